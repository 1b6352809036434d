"""Launch configurations chosen offline, one JSON file for each kind of device."""
