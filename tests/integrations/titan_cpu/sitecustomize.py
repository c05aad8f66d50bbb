"""The CPU is what torchtitan's command finds on a machine without an accelerator: python imports this
by its name where this folder is in PYTHONPATH.
"""

import sys

if any("torchtitan" in word for word in sys.orig_argv):
    from types import SimpleNamespace

    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    _SAID = {
        "get_device_name": "CPU",
        "memory_stats": {},
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "get_device_properties": SimpleNamespace(total_memory=1),
    }
    for _name, _value in _SAID.items():
        setattr(torch.cpu, _name, lambda *_, value=_value: value)
