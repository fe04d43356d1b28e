"""The rollout service: a durable ledger, three stage pools, and a facade."""
