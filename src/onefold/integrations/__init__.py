"""Room `integrations`: other people's names for the same machinery. Each module is imported on
demand.
"""
