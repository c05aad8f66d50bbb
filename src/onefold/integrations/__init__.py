"""Room `integrations`: adapters to other libraries. Each module is imported on demand."""
