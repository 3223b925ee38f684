//! Fitting the cache into a budget: how many experts of each layer can be resident beside everything else that the
//! device has to hold.
//!
//! All sizes are exact and known before anything is allocated. They are those that [`HostMemory`] reports, without the
//! host store: that is host memory whatever the device is.
//!
//! [`HostMemory`]: crate::engine::HostMemory

use horizon_cache::Geometry;
use serde::Serialize;
use thiserror::Error;

use crate::residency::device_bytes;
use crate::size::bytes;

/// What the device holds beside slots, spares and staging buffers: non-routed weights, KV cache, workspaces.
pub type Ledger = Vec<(&'static str, u64)>;

/// A capacity inside a budget.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Bytes that may be used.
    pub budget_bytes: u64,
    /// Resident experts a layer.
    pub capacity: usize,
    /// Whether the budget chose the capacity; else it was given, and fits.
    pub chosen: bool,
    /// Everything that the device holds, in bytes.
    pub ledger: Ledger,
    /// Sum of the ledger.
    pub total_bytes: u64,
    /// What one more resident expert in each layer would take.
    pub next_expert_bytes: u64,
    /// Whether all experts of each layer are resident: the budget could not buy more.
    pub all_experts: bool,
}

/// A budget that does not hold what is asked of it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BudgetError {
    /// Not even the fewest experts fit.
    #[error(
        "{}--vram {}: too little by {}. With the fewest resident experts, {capacity} a layer, the model needs {}: {}. \
         A shorter --ctx needs less",
        asked.map_or_else(String::new, |c| format!("-c {c} with ")),
        bytes(*.budget), bytes(total - budget), bytes(*total), listed(ledger)
    )]
    TooSmall {
        /// Bytes that may be used.
        budget: u64,
        /// The capacity that was asked for with it.
        asked: Option<usize>,
        /// The fewest experts: those of one token.
        capacity: usize,
        /// What is needed.
        ledger: Ledger,
        /// Sum of it.
        total: u64,
    },
    /// The capacity that was given does not fit.
    #[error(
        "-c {capacity} and --vram {} contradict each other: {capacity} resident experts a layer need {}, {} too much; \
         -c {most} is the most that fits. Needed: {}",
        bytes(*.budget), bytes(*total), bytes(total - budget), listed(ledger)
    )]
    Capacity {
        /// Bytes that may be used.
        budget: u64,
        /// What was asked for.
        capacity: usize,
        /// What would fit.
        most: usize,
        /// What is needed.
        ledger: Ledger,
        /// Sum of it.
        total: u64,
    },
}

fn listed(ledger: &Ledger) -> String {
    let lines: Vec<String> = ledger
        .iter()
        .map(|(what, n)| format!("{what} {}", bytes(*n)))
        .collect();
    lines.join(", ")
}

/// Fits a cache into `budget` bytes. `least` has the fewest experts that the model can run with; `given` is a
/// capacity that was asked for; `beside` is what else the device holds; a tiled record has `record_bytes`.
///
/// # Errors
/// [`BudgetError`] with the sizes.
pub fn fit(
    budget: u64,
    least: &Geometry,
    given: Option<usize>,
    beside: &[(&'static str, u64)],
    record_bytes: usize,
) -> Result<Fit, BudgetError> {
    let with = |capacity| {
        let geometry = Geometry {
            capacity,
            ..least.clone()
        };
        let mut ledger = beside.to_vec();
        ledger.extend(device_bytes(&geometry, record_bytes));
        let total: u64 = ledger.iter().map(|(_, n)| n).sum();
        (ledger, total)
    };
    let (ledger, total) = with(least.capacity);
    if total > budget {
        return Err(BudgetError::TooSmall {
            budget,
            asked: given,
            capacity: least.capacity,
            ledger,
            total,
        });
    }
    let next_expert_bytes = with(least.capacity + 1).1 - total;
    let more = (budget - total)
        .checked_div(next_expert_bytes)
        .unwrap_or(u64::MAX);
    let room = least.experts - least.capacity;
    let most = least.capacity + usize::try_from(more).unwrap_or(room).min(room);
    let capacity = given.unwrap_or(most);
    let (ledger, total) = with(capacity);
    if capacity > most {
        return Err(BudgetError::Capacity {
            budget,
            capacity,
            most,
            ledger,
            total,
        });
    }
    Ok(Fit {
        budget_bytes: budget,
        capacity,
        chosen: given.is_none(),
        ledger,
        total_bytes: total,
        next_expert_bytes,
        all_experts: capacity == least.experts,
    })
}

impl Fit {
    /// What was chosen and why, a line for each size.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let head = if self.chosen { "chosen" } else { "fits" };
        let mut lines = vec![format!(
            "--vram {}: {head} -c {}",
            bytes(self.budget_bytes),
            self.capacity
        )];
        let rows = self.ledger.iter().copied().chain([
            ("in all", self.total_bytes),
            ("left", self.budget_bytes - self.total_bytes),
        ]);
        let rows: Vec<(&str, String)> = rows.map(|(what, n)| (what, bytes(n))).collect();
        let width = |of: fn(&(&str, String)) -> usize| rows.iter().map(of).max().unwrap_or(0);
        let (names, sizes) = (width(|r| r.0.len()), width(|r| r.1.len()));
        lines.extend(
            rows.iter()
                .map(|(what, size)| format!("  {what:<names$}  {size:>sizes$}")),
        );
        lines.push(if self.all_experts {
            "  every expert of each layer is resident: more memory would not be used".into()
        } else {
            format!(
                "  one more expert in each layer takes {}",
                bytes(self.next_expert_bytes)
            )
        });
        lines
    }
}

#[cfg(test)]
mod tests {
    use horizon_core::ids::LayerId;

    use super::*;
    use crate::residency::STAGING_BUFFERS;

    /// Records of 128 bytes in three layers of 4 to 10 experts.
    fn least() -> Geometry {
        Geometry {
            layers: vec![LayerId(0), LayerId(2), LayerId(5)],
            experts: 10,
            top_k: 4,
            capacity: 4,
            spares: 5,
        }
    }

    const BESIDE: [(&str, u64); 2] = [("non-routed weights", 1000), ("KV cache", 24)];

    fn needed(capacity: u64) -> u64 {
        1024 + 128 * (3 * capacity + 5 + STAGING_BUFFERS as u64)
    }

    #[test]
    fn the_budget_buys_the_most_experts_to_the_byte() {
        for capacity in 4..=10 {
            for spare in [0, 1, 3 * 128 - 1] {
                let budget = needed(capacity) + spare;
                // 127 bytes are padded to a cache line.
                let fit = fit(budget, &least(), None, &BESIDE, 127).expect("fits");
                assert_eq!(fit.capacity as u64, capacity, "{budget}");
                assert_eq!((fit.total_bytes, fit.chosen), (needed(capacity), true));
                assert_eq!((fit.next_expert_bytes, fit.all_experts), (384, capacity == 10));
                assert_eq!(fit.ledger.iter().map(|(_, n)| n).sum::<u64>(), fit.total_bytes);
            }
        }
        let all = fit(u64::MAX, &least(), None, &BESIDE, 127).expect("fits");
        assert_eq!((all.capacity, all.total_bytes), (10, needed(10)));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_sizes() {
        let error = fit(needed(4) - 1, &least(), None, &BESIDE, 127).expect_err("a byte too little");
        let text = error.to_string();
        for part in [
            "--vram",
            "too little by 1 B",
            "4 a layer",
            "KV cache 24 B",
            "--ctx",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = fit(needed(4) - 1, &least(), Some(9), &BESIDE, 127)
            .expect_err("a byte too little")
            .to_string();
        assert!(text.starts_with("-c 9 with --vram"), "{text}");
        let text = fit(needed(7), &least(), Some(9), &BESIDE, 127)
            .expect_err("contradicts")
            .to_string();
        for part in ["-c 9", "--vram", "-c 7 is the most", "768 B too much"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let given = fit(needed(7), &least(), Some(6), &BESIDE, 127).expect("fits");
        assert_eq!(
            (given.capacity, given.chosen, given.total_bytes),
            (6, false, needed(6))
        );
    }

    #[test]
    fn the_table_names_every_size() {
        let fit = fit(needed(7) + 9, &least(), None, &BESIDE, 127).expect("fits");
        let lines = fit.lines().join("\n");
        for part in [
            "chosen -c 7",
            "non-routed weights",
            "expert slots",
            "spare slots",
            "staging",
            "9 B",
        ] {
            assert!(lines.contains(part), "{part}: {lines}");
        }
    }
}
