"""The recurrences, one implementation per device. `reference` is the specification, `dispatch` chooses."""
