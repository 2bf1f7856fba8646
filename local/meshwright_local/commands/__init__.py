"""The `meshwright local` commands."""
