"""From evidence to a predicted switch: cost laws, calibration, the SimPy engine, the planner."""
