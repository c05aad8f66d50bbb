"""Room `doctor`: measure what a machine can do, keep the figures in a file, and answer questions
about them. `onefold doctor` measures and the plan asks. This room depends on neither plan nor
training.
"""
