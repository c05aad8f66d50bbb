"""Room `inspection`: a checkpoint without ranks and without a model, behind `onefold checkpoint`.

summary   what it holds     verify    whether every byte is what was saved
diff      what differs between two     reshard   the same in another number of files
"""
