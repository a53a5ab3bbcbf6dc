"""Takes the place of Ray: its nodes are entries of a file, and starting it lasts until it is told to end.

FAKE_RAY names a folder: nodes.json has {NAME: [ADDRESS, ID]} as tests/stand_in_bridge.py reads it, head.json
[NAME, ADDRESS], token the cluster's token, versions the head's [RAY, PYTHON] if they differ.
"""
