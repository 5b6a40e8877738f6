"""Read off recorded values what has free numbers: a weight, a bias, one constant in linear maps, norms and wiring."""
