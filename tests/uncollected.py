"""Imported first by a fork server: until `frozen` is imported, nothing is collected. What an import
makes stays, and going over it again and again takes a fifth of its time.
"""

from __future__ import annotations

import gc

gc.disable()
