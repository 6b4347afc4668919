"""Plans: what ranks do in an iteration, as tasks; strategy strings, meshes, schedules, collectives."""
