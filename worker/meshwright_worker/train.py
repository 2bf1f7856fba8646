"""stub while building"""
