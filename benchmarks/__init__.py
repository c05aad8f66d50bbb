"""Measurements of Onefold beside other libraries. The package `onefold` imports nothing of it."""
