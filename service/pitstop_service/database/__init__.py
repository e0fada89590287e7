"""The store: engine, unit of work, migrations. Tables are declared by the domains."""
