"""What Onefold's runs and plans come to, recorded: a change that is meant to leave every number as
it is compares against it.
"""
