"""Copies of the code as it was submitted, made and read by clients, as the user, in the user's state folder.

    listing     what belongs to a snapshot: by git, or by a walk
    copying     the copy, and its name, which is made of its content
    keep        finding an equal copy or making one, telling about one
    outside     what of a submission leads out of its copy
    submitting  from a submission to one that starts in a copy
    prune       dropping those that no job needs

The daemon knows a snapshot by its name alone and opens none of its files.
"""
