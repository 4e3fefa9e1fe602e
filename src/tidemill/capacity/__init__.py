"""Pure: samples to capacity and demand, capacity to targets, each target with its explanation."""
