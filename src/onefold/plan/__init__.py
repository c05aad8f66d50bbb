"""Room `plan`: what a job will hold, send and take, before it runs. Knows no running engine."""
