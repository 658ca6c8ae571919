"""From a function and a tolerance to a head: plan, build, compile, and the object that is returned."""
