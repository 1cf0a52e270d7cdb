"""The geometry of per-rollout gradients, read from their Gram matrix K_ij = ⟨g_i, g_j⟩."""
