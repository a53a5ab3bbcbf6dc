"""Copies of the code as it was submitted, made and read by clients, as the user, in the user's state folder.

    listing   what belongs to a snapshot: by git, or by a walk
    keep      making the copy, finding an equal one, telling about one
    prune     dropping those that no job needs

The daemon knows a snapshot by its name alone and opens none of its files.
"""
