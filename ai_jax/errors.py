"""The one exception that the command line turns into a sentence instead of a traceback."""


class UserError(Exception):
    """Something that the user can put right: one sentence saying what is wrong and what to do.

    ``ai-jax`` prints it as ``ai-jax: error: <sentence>`` and exits with code 2.
    """
