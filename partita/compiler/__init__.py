"""From a function and a tolerance to a head: plan, build, and what comes back."""
