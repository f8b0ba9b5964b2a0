"""Only arrays: confidences and losses that somebody measured, no model in sight.

Two ways of answering support questions: a small model that also says how sure it is, and a large
one that costs twelve times as much. Quality is a grade between 0 and 1 given by people.
"""

import numpy as np

import swiftsure as ss

# What was measured on 800 questions. These lines stand in for reading your own table.
rng = np.random.default_rng(3)
difficulty = rng.beta(1.5, 4.0, 800)
sure = np.clip(1 - difficulty + rng.normal(0, 0.08, 800), 0, 1)
grade_small = np.clip(1 - 1.2 * difficulty * (rng.random(800) < 0.6), 0, 1)
grade_large = np.clip(1 - 0.5 * difficulty * (rng.random(800) < 0.4), 0, 1)

record = ss.ExitRecord(
    sure[:, None],  # one confidence: that of the exit before the last
    losses={"grade": np.stack([1 - grade_small, 1 - grade_large], axis=1)},
    loss_ranges={"grade": (0, 1)},
    costs={"cents": [0.1, 1.3]},  # the large one runs after the small one
)

policy = ss.calibrate(record, risk="gap", loss="grade", epsilon=0.05, delta=0.1)
print(policy)
policy.save("policy.json")

# In production: ask the small one, and the large one only if its confidence is below this.
print(f"\nThreshold: {policy.threshold:.3f}")
leaves = policy.exits(sure[:, None]) == 0
print(f"{leaves.mean():.0%} of questions never reach the large model,")
print(f"and a question costs {np.where(leaves, 0.1, 1.3).mean():.2f} cents in place of 1.20.")
