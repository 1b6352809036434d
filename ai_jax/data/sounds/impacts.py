"""Things that hit, break or burst: glass, knocks, explosions, thunder, doors, steps, keys."""

from __future__ import annotations

import numpy as np

from ai_jax.data.sounds.dsp import (
    RATE,
    Audio,
    Rng,
    add,
    choose,
    convolved,
    decay,
    filtered,
    high_pass,
    hull,
    line,
    log_uniform,
    low_pass,
    modes,
    noise,
    peak,
    pulses,
    samples,
    shelf,
    unit,
    wander,
)


def _click(rng: Rng, n: int, t60: float, *body: tuple[float, float, float]) -> Audio:
    """A burst of noise that dies within ``t60`` seconds through resonances ``body``."""
    x = filtered(noise(rng, n) * decay(n, t60), shelf(*body, floor=0.05))
    return unit(x * hull(n, 0.002, 0.005))


def glass_break(rng: Rng) -> Audio:
    """The blow, then a shower of shards that ring high and fall one after the other."""
    out = np.zeros(samples(rng.uniform(0.7, 2.2)))
    n = len(out)
    low, high = log_uniform(rng, 1200, 2600), rng.uniform(5500, 7600)
    at = rng.uniform(0.005, 0.1)
    m = min(n, samples(0.5))
    blow = noise(rng, m, rng.uniform(-2, 2)) * decay(m, log_uniform(rng, 0.06, 0.35), 0.001)
    blow = filtered(blow, high_pass(log_uniform(rng, 200, 1500)))
    add(out, unit(blow), at, rng.uniform(0.5, 1.2))
    if rng.random() < 0.5:
        thud = modes(m, rng.uniform(90, 500, 4), [0.15] * 4, rng.uniform(0.3, 1, 4), rng)
        add(out, unit(thud), at, rng.uniform(0.1, 0.6))
    pane = rng.uniform(low, high, 30)
    ring = modes(
        m, pane, log_uniform(rng, 0.1, 0.6) * rng.uniform(0.4, 1.4, 30), rng.uniform(0, 1, 30), rng
    )
    add(out, unit(ring), at, rng.uniform(0.3, 1.0))
    spread = log_uniform(rng, 0.08, 0.4)
    shards = int(rng.integers(25, 90))
    for start in at + rng.exponential(spread, shards):
        k = int(rng.integers(2, 6))
        m = samples(rng.uniform(0.04, 0.25))
        t60 = log_uniform(rng, 0.03, 0.3)
        shard = modes(
            m,
            rng.uniform(low, high, k),
            t60 * rng.uniform(0.5, 1.2, k),
            rng.uniform(0.2, 1, k),
            rng,
        )
        shard[:64] += noise(rng, 64) * decay(64, 0.003) * rng.uniform(0.3, 2)
        add(out, shard, start, log_uniform(rng, 0.03, 0.5) * np.exp(-(start - at) / (2.5 * spread)))
    return out * hull(n, 0.0, 0.15)


def dishes(rng: Rng) -> Audio:
    """Plates, cups and cutlery that touch without breaking: single clear clinks."""
    out = np.zeros(samples(rng.uniform(1.0, 3.5)))
    things = []
    for _ in range(int(rng.integers(1, 5))):
        k = int(rng.integers(3, 8))
        f = log_uniform(rng, 700, 3500) * np.cumprod(rng.uniform(1.1, 1.7, k))
        things.append((f, log_uniform(rng, 0.06, 0.6) * rng.uniform(0.5, 1.2, k)))
    at = rng.uniform(0, 0.2)
    while at < len(out) / RATE - 0.1:
        f, t60 = things[int(rng.integers(len(things)))]
        m = samples(0.5)
        x = unit(modes(m, f, t60, rng.uniform(0.2, 1, len(f)), rng))
        x += rng.uniform(0, 0.5) * _click(rng, m, 0.01, (f[0], f[0], 1.0))
        add(out, x, at, log_uniform(rng, 0.15, 1))
        at += rng.exponential(0.35) + 0.03
    return out


def knock(rng: Rng) -> Audio:
    """Two to six blows of knuckles on a wooden or metal door."""
    count = int(rng.choice([2, 3, 3, 3, 4, 4, 5, 6]))
    interval = log_uniform(rng, 0.16, 0.5)
    count *= 1 + (rng.random() < 0.25)
    base = log_uniform(rng, 90, 280)
    k = 20
    f = base * (1 + np.cumsum(rng.uniform(0.1, 1.0, k)))
    f = np.append(f, base)
    t60 = rng.uniform(0.02, 0.065) * (f / base) ** -rng.uniform(0.2, 0.6)
    gains = rng.uniform(0.3, 1, k + 1) * (f / base) ** -rng.uniform(0.3, 1.0)
    contact = rng.uniform(800, 3500)
    out = np.zeros(samples(count * interval * 1.15 + 0.5))
    at = rng.uniform(0.02, 0.1)
    for i in range(count):
        m = samples(0.25)
        x = unit(
            modes(m, f * rng.uniform(0.99, 1.01), t60, gains * rng.uniform(0.7, 1.3, k + 1), rng)
        )
        x += rng.uniform(0.2, 0.8) * _click(
            rng, m, rng.uniform(0.01, 0.03), (contact, contact, 1.0)
        )
        add(out, x, at, rng.uniform(0.65, 1))
        at += interval * rng.uniform(0.92, 1.08)
        if count > 5 and i == count // 2 - 1:
            at += interval * rng.uniform(1, 2)
    return out[: samples(at + 0.15)]


def explosion(rng: Rng) -> Audio:
    """Explosions (blast, roar, debris) and gunshots (crack, echo), single or in series."""
    if rng.random() < 0.35:
        return _gunfire(rng)
    n = samples(rng.uniform(1.2, 4.0))
    t60 = rng.uniform(0.8, 3.0)
    blast = noise(rng, n, rng.uniform(1.5, 5)) * decay(n, log_uniform(rng, 0.1, 0.5), 0.002)
    roar = noise(rng, n, rng.uniform(4, 6)) * decay(n, t60, 0.01)
    roar *= np.exp(wander(rng, n, 12, rng.uniform(0.1, 0.6)))
    boom = modes(
        n, rng.uniform(35, 130, 5), t60 * rng.uniform(0.3, 0.9, 5), rng.uniform(0.3, 1, 5), rng
    )
    out = unit(blast) * rng.uniform(0.5, 1.2) + unit(roar) * rng.uniform(0.6, 1.2)
    out += unit(boom) * rng.uniform(0.1, 0.8)
    out = filtered(out, low_pass(log_uniform(rng, 500, 3000)))
    for start in rng.exponential(0.6, int(rng.integers(0, 25))):  # debris
        m = samples(0.08)
        body = (log_uniform(rng, 500, 4000), 1000.0, 1.0)
        add(out, _click(rng, m, 0.04, body), 0.1 + start, log_uniform(rng, 0.01, 0.1))
    return np.tanh(rng.uniform(1, 5) * unit(out)) * hull(n, 0.0, 0.4)


def _gunfire(rng: Rng) -> Audio:
    shots = int(rng.choice([1, 1, 1, 2, 3, 6, 10]))
    interval = rng.uniform(0.055, 0.09) if shots > 5 else rng.uniform(0.25, 0.8)
    n = samples(shots * interval + rng.uniform(0.4, 1.0))
    out = np.zeros(n)
    m = samples(0.9)
    crack_t60, tail_t60 = log_uniform(rng, 0.03, 0.12), rng.uniform(0.25, 0.6)
    tail_slope, tail = rng.uniform(3.5, 6), rng.uniform(0.15, 0.6)
    for i in range(shots):
        x = unit(noise(rng, m, rng.uniform(0, 4)) * decay(m, crack_t60, 0.0005))
        x += tail * unit(noise(rng, m, tail_slope) * decay(m, tail_t60, 0.003))
        x += 0.5 * unit(modes(m, rng.uniform(80, 300, 3), [0.12] * 3, [1, 0.7, 0.5], rng))
        add(out, np.tanh(rng.uniform(0.5, 1.8) * x), 0.01 + i * interval, rng.uniform(0.8, 1))
    return out * hull(n, 0.0, 0.1)


def thunder(rng: Rng) -> Audio:
    """A crack when near, then rolling low rumble for seconds."""
    n = samples(rng.uniform(2.5, 6.0))
    near = rng.random() ** 1.5
    peals = np.zeros(n)
    at = rng.uniform(0.0, 0.3)
    for _ in range(int(rng.integers(3, 9))):  # the channel's segments arrive one after the other
        m = samples(rng.uniform(0.4, 2.5))
        add(
            peals, decay(m, rng.uniform(0.6, 2.5), rng.uniform(0.01, 0.25)), at, rng.uniform(0.3, 1)
        )
        at += rng.exponential(0.45)
    peals *= np.exp(wander(rng, n, 9, rng.uniform(0.2, 0.6)))
    rumble = filtered(noise(rng, n, 4.5), low_pass(log_uniform(rng, 110, 420)), high_pass(30))
    crackle = noise(rng, n, 3) * np.exp(wander(rng, n, 14, 0.6))
    crackle = filtered(crackle, low_pass(1000 + 4000 * near), high_pass(150))
    bright = decay(n, rng.uniform(0.5, 2.5), 0.01)
    out = rumble / rumble.std() * peals
    out += near * rng.uniform(0.1, 0.8) * crackle / crackle.std() * peals * bright
    if near > 0.75:
        m = samples(0.4)
        clap = noise(rng, m, 1) * decay(m, rng.uniform(0.08, 0.4), 0.002)
        add(out, clap, rng.uniform(0, 0.15), rng.uniform(0.3, 1.5))
    if rng.random() < 0.6:  # it rains
        out = out + log_uniform(rng, 0.005, 0.06) * noise(rng, n, rng.uniform(0, 2))
    return out * hull(n, 0.01, 0.8)


def door(rng: Rng) -> Audio:
    """A door that closes (latch, slam) or creaks (stick-slip)."""
    if rng.random() < 0.5:
        n = samples(rng.uniform(1.0, 3.5))
        rate = np.exp(wander(rng, n, 2.0, 0.5)) * log_uniform(rng, 25, 160)
        x = pulses(rate) * (1 + wander(rng, n, 20, 0.4)) + 0.02 * noise(rng, n)
        wood = [(log_uniform(rng, 300, 4000), 200.0, rng.uniform(0.3, 1)) for _ in range(5)]
        return filtered(x, shelf(*wood, floor=0.02)) * hull(n, 0.1, 0.2)
    out = np.zeros(samples(rng.uniform(0.5, 1.1)))
    at = rng.uniform(0.02, 0.2)
    m = samples(0.05)
    for _ in range(int(rng.integers(1, 4))):
        add(
            out,
            _click(rng, m, 0.02, (log_uniform(rng, 1200, 5000), 900, 1.0)),
            at,
            rng.uniform(0.1, 0.5),
        )
        at += rng.uniform(0.03, 0.12)
    m = samples(0.4)
    f = log_uniform(rng, 55, 130) * (1 + np.cumsum(rng.uniform(0.2, 0.9, 8)))
    slam = unit(modes(m, f, rng.uniform(0.08, 0.3) * (f / f[0]) ** -0.5, (f / f[0]) ** -1.0, rng))
    slam += rng.uniform(0.2, 0.7) * _click(rng, m, 0.06, (rng.uniform(300, 1500), 800, 1.0))
    add(out, slam, at)
    return out


def footsteps(rng: Rng) -> Audio:
    """Heel and sole on wood, stone, gravel or snow, at walking or running pace."""
    out = np.zeros(samples(rng.uniform(2.0, 5.0)))
    interval = log_uniform(rng, 0.28, 0.75)
    ground = choose(rng, "hard", "hard", "wood", "gravel")
    heel = log_uniform(rng, 900, 3500) if ground == "hard" else log_uniform(rng, 120, 500)
    at = rng.uniform(0, 0.3)
    while at < len(out) / RATE - 0.2:
        m = samples(0.22)
        if ground == "gravel":
            grains = np.abs(noise(rng, m)) > rng.uniform(1.5, 2.3)
            x = filtered(
                noise(rng, m) * grains * hull(m, 0.04, 0.12), peak(rng.uniform(1500, 4000), 3500)
            )
            x = unit(x)
        else:
            wide = rng.uniform(0.5, 1.2) * heel
            x = _click(rng, m, rng.uniform(0.03, 0.09), (heel * rng.uniform(0.9, 1.1), wide, 1.0))
            sole = _click(rng, m, 0.05, (rng.uniform(150, 900), 600, 1.0))
            add(x, sole, rng.uniform(0.04, 0.09), rng.uniform(0.1, 0.5))
        add(out, x, at, rng.uniform(0.5, 1))
        at += interval * rng.uniform(0.93, 1.07)
    return out


def typing(rng: Rng) -> Audio:
    """Keys of a laptop, a mechanical keyboard or a typewriter, pressed and released."""
    out = np.zeros(samples(rng.uniform(2.0, 5.0)))
    rate = rng.uniform(3, 11)
    plastic, case = log_uniform(rng, 1800, 5500), log_uniform(rng, 250, 1100)
    t60 = log_uniform(rng, 0.008, 0.03)
    ring = log_uniform(rng, 1500, 6500) if rng.random() < 0.4 else 0.0
    at = rng.uniform(0, 0.2)
    while at < len(out) / RATE - 0.1:
        m = samples(0.07)
        colour = rng.uniform(0.85, 1.15)
        body = ((plastic * colour, plastic, 1.0), (case, 300, rng.uniform(0.2, 0.9)))
        down = _click(rng, m, t60 * rng.uniform(0.7, 1.3), *body)
        if ring:
            down += 0.3 * modes(m, [ring, 1.6 * ring], [0.1, 0.06], [1, 0.5], rng)
        add(out, down, at, rng.uniform(0.4, 1))
        add(
            out,
            _click(rng, m, 0.6 * t60, *body),
            at + rng.uniform(0.05, 0.13),
            rng.uniform(0.1, 0.5),
        )
        at += rng.gamma(3.0, 1 / (3 * rate)) + (rng.random() < 0.06) * rng.uniform(0.3, 0.8)
    return filtered(out, high_pass(log_uniform(rng, 100, 700)))


def clock(rng: Rng) -> Audio:
    """Tick-tock of a clock, from wrist watch to grandfather."""
    out = np.zeros(samples(rng.uniform(2.5, 5.0)))
    interval = choose(rng, 1.0, 0.5, 0.5, 0.25, 0.2)
    base = log_uniform(rng, 900, 5000)
    t60 = log_uniform(rng, 0.01, 0.08)
    k = 5
    f = base * rng.uniform(0.6, 2.2, k)
    tock = rng.uniform(0.7, 1.0)
    at, i = rng.uniform(0, interval), 0
    while at < len(out) / RATE:
        m = samples(0.12)
        scale = tock if i % 2 else 1.0
        x = modes(m, f * scale, t60 * rng.uniform(0.9, 1.1, k), np.linspace(1, 0.3, k), rng)
        x += 0.5 * _click(rng, m, 0.005, (base, base, 1.0))
        add(out, x, at, 0.7 if i % 2 else 1.0)
        at, i = at + interval, i + 1
    return out


def applause(rng: Rng) -> Audio:
    """From a few pairs of hands to a hall full of them."""
    n = samples(rng.uniform(2.0, 5.0))
    people, out = log_uniform(rng, 5, 1000), np.zeros(n)
    for _ in range(8):  # so many kinds of hands, each clapping at random times
        strokes = np.zeros(n)
        at = rng.integers(0, n, max(1, int(people / 8 * n / RATE * rng.uniform(3, 5))))
        strokes[at] = rng.uniform(0.3, 1, len(at))
        body = (log_uniform(rng, 700, 2600), 900.0, 1.0)
        clap = _click(rng, samples(0.05), rng.uniform(0.008, 0.02), body)
        out += log_uniform(rng, 0.3, 1) * convolved(strokes, clap)[:n]
    out = filtered(out, high_pass(log_uniform(rng, 200, 700), 2))
    return out * line(n, (0, rng.uniform(0.2, 1)), (0.3, 1), (1, rng.uniform(0.2, 1)))
