"""Who may have how much: shares of accounts, queues with guarantees, limits of queues and QOS.

usage           what jobs hold, and what they have held, fading
accounts        the tree of accounts and Slurm's Fair Tree over it
queues          the tree of queues as the settings give it
quota           what queues, users and QOS hold against what they may hold; who takes back from whom
limits          one limit, with its sentence
ledger          who has lent what to whom
quota_problems  promises that cannot be kept
admission       what is refused at submission
membership      which accounts a user may submit to
upward          walks up a tree
"""
