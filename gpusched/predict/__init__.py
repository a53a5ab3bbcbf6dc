"""How long jobs will run and how much VRAM they will use, learned from those like them. Nothing is ended for it.

families     who is like whom, and what the newest runs of a family say
past         run times by marks, narrow to wide, and a guess for one more job
judging      whether guesses have been better than the limits of each user
overruns     limits that were too short, and how long jobs like those take
limits       the time limit that jobs like it keep, and their run times as people say them
calibrating  ranges of starts that hold as often as they say
vram         what runs used of their cards

No clock, no file: what has ended is told, what is to come is asked.
"""
