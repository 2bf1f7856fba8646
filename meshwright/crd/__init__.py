"""The CustomResourceDefinition and the field reference, generated from the API models."""
