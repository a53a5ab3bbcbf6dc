"""Predicts how long a job will run and how much VRAM it will use from earlier jobs like it. Never ends a run.

family       which jobs count as alike; what the newest runs of a family say
predictor    run times learned as jobs end, whether they beat users' limits, and limits that were too short
limits       the time limit that jobs like this one keep; run times in words
calibration  ranges of start times that hold as often as stated

Pure: callers report the runs that ended and ask about the ones to come.
"""
