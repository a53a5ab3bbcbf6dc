"""Copies of the code as submitted, made and read by clients, as the user, in the user's state folder.

    file_list   what belongs to a snapshot: by git, or by a walk
    snapshot    finding an equal copy or making one, named after its content
    submission  from a submission to one that starts in a copy, and what of it still leads out of the copy
    retention   removing snapshots that no job needs

The daemon knows a snapshot by its name alone and opens none of its files.
"""
