"""Parts that hold or move bytes, each by itself: layout, memory, device, groups, codecs, the host, NVMe."""
