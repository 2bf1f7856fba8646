"""The `meshwright` command. It talks to clusters and starts programs; it never imports an image's package."""
