"""Only arrays: calibrate from measured confidences and losses, without a model.

A small model answers support questions and says how confident it is. A large one costs twelve
times as much. People graded the answers of both between 0 and 1.
"""

import numpy as np

import swiftsure as ss

# Measurements on 800 questions. Replace these lines with your own table.
rng = np.random.default_rng(3)
difficulty = rng.beta(1.5, 4.0, 800)
sure = np.clip(1 - difficulty + rng.normal(0, 0.08, 800), 0, 1)
grade_small = np.clip(1 - 1.2 * difficulty * (rng.random(800) < 0.6), 0, 1)
grade_large = np.clip(1 - 0.5 * difficulty * (rng.random(800) < 0.4), 0, 1)

record = ss.ExitRecord(
    sure[:, None],  # every exit but the last has a confidence; here, that is the small model
    losses={"grade": np.stack([1 - grade_small, 1 - grade_large], axis=1)},
    loss_ranges={"grade": (0, 1)},
    costs={"cents": [0.1, 1.3]},  # cumulative: the large model runs after the small one
    full_costs={"cents": 1.2},  # the large model alone, which savings are measured against
)

policy = ss.calibrate(record, risk="gap", loss="grade", epsilon=0.05, delta=0.1)
print(policy)
policy.save("policy.json")

# In production, ask the large model only if the small one's confidence is below this threshold.
print(f"\nThreshold: {policy.threshold:.3f}")
stops = policy.exits(sure[:, None]) == 0
print(f"{stops.mean():.0%} of questions never reach the large model,")
print(f"and a question costs {np.where(stops, 0.1, 1.3).mean():.2f} cents instead of 1.20.")
