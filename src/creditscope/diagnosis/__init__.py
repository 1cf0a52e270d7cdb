"""What is wrong with a run, from its trainer's own log and settings alone: no model, no torch.

    read      files of any trainer -> a Log: rows of numbers, each with its place, and the settings
    trainers  what TRL, verl and creditscope call things, and what a run's settings imply
    rules     one rule a function: Log -> Finding
"""
