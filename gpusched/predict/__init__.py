"""Predicts run times and VRAM use of jobs from similar earlier jobs. Never ends a run.

family       which jobs are similar; statistics of a family's latest runs
predictor    run times learned as jobs end, whether they beat users' limits, and limits that were too short
limits       the time limit that similar jobs keep; run times in words
calibration  ranges of start times with a stated coverage

Pure: callers report ended runs and query future ones.
"""
