"""Copies of submitted code, made and read by clients as the user, in the user's state folder.

    file_list   contents of a snapshot: by git, or by a walk
    snapshot    finds an equal copy or makes one, named after its content
    submission  points a submission at a copy, and lists its remaining references outside the copy
    retention   removes snapshots that no job needs

The daemon knows a snapshot by its name alone and opens none of its files.
"""
