"""Programming tasks, graded by running the program on hidden tests in a clean sandbox."""
