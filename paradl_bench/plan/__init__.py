"""Plans: what ranks do in an iteration, as tasks; axes, works, meshes, schedules, collectives."""
