"""The controller: discovery, attribution, engine loop, reconciler, actuation."""
