"""Loading models, and every difference between model classes, families and TransformerLens versions."""
