"""What every recipe promises, asked of one training each: a table of rows, and one loop over it."""
