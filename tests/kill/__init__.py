"""Kill -9 at every boundary"""
