"""Measurements of Onefold beside other libraries. Nothing in the package `onefold` imports from
here.
"""
