"""The measures of the reference schedules, as the independent simulator gives them, rounded as it rounds."""

from __future__ import annotations

RIGID = {
    "fcfs": (218832.062, 4294.5004, 28779758, 0.68371),
    "fcfs+greedy": (5639.067, 71.639, 28763776, 0.68409),
    "fcfs+easy": (6351.493, 86.3712, 28763776, 0.68409),
    "fcfs+cons": (7627.938, 97.4822, 28763776, 0.68409),
    "sjf": (12937.04, 131.668, 28763776, 0.68409),
    "sjf+easy": (4377.621, 41.8744, 28763776, 0.68409),
    "saf+easy": (5075.529, 40.6765, 28763776, 0.68409),
    "sjf_exact+easy": (3927.901, 22.2521, 28763776, 0.68409),
    "fcfs+easy, est=run": (6098.585, 71.5233, 28763776, 0.68409),
}
"""kth_sp2: mean wait, mean bounded slowdown, makespan, utilisation."""

GANG = {
    "muri_trace1@8x8": {
        "fcfs+none/best": (10750750.6, 11001202.4, 39438.343, 11031116.7),
        "fcfs+none/first": (10934380.6, 11184832.4, 40119.94, 11212288.5),
        "fcfs+none/spread": (11909977.4, 12160429.2, 43333.24, 12160969.4),
        "fcfs+greedy/best": (5298309.7, 5548761.5, 21019.394, 10520966.8),
        "fcfs+greedy/spread": (5390047.3, 5640499.1, 21400.433, 10659329.2),
        "fcfs+easy/best": (6601303.6, 6851755.4, 21257.629, 10011846.0),
        "fcfs+easy/spread": (7300049.0, 7550500.7, 22451.636, 10580031.1),
        "sjf+none/best": (1373157.2, 1623609.0, 78.595, 1682545.9),
        "sjf+greedy/best": (1666696.6, 1917148.4, 2748.923, 4077321.4),
        "sjf+easy/best": (998555.2, 1249006.9, 73.179, 2244036.2),
    },
    "tiresias_60jobs@4x8": {
        "fcfs+none/best": (0.0, 178.4, 1.0, 0.0),
        "fcfs+none/first": (0.0, 178.4, 1.0, 0.0),
        "fcfs+none/spread": (3.0, 181.4, 1.02, 16.8),
        "fcfs+greedy/best": (0.0, 178.4, 1.0, 0.0),
        "fcfs+greedy/spread": (2.8, 181.2, 1.02, 16.8),
        "fcfs+easy/best": (0.0, 178.4, 1.0, 0.0),
        "fcfs+easy/spread": (2.8, 181.2, 1.02, 16.8),
        "sjf+none/best": (0.0, 178.4, 1.0, 0.0),
        "sjf+greedy/best": (0.0, 178.4, 1.0, 0.0),
        "sjf+easy/best": (0.0, 178.4, 1.0, 0.0),
    },
}
"""Mean wait, mean job completion time, mean bounded slowdown, mean wait of jobs of 8 or more GPUs."""
