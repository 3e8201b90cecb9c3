//! Axes: from values to places, and where the ticks are. Pure.

/// How values lie along an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    /// The places of `low` and `high`.
    start: f64,
    end: f64,
}

impl Axis {
    /// An axis from `low` to `high`, drawn from `start` to `end`.
    pub(super) fn new((low, high): (f64, f64), is_log: bool, (start, end): (f64, f64)) -> Axis {
        Axis {
            low,
            high,
            is_log,
            start,
            end,
        }
    }

    /// Where a value is drawn.
    pub(super) fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| match self.is_log {
            true => value.max(f64::MIN_POSITIVE).ln(),
            false => value,
        };
        let span = scale(self.high) - scale(self.low);
        let share = match span > 0.0 {
            true => (scale(value) - scale(self.low)) / span,
            false => 0.5,
        };
        self.start + share * (self.end - self.start)
    }
}

/// Ticks at round numbers from 0 to beyond `high`, about `count` of them.
pub(super) fn linear_ticks(high: f64, count: usize) -> Vec<f64> {
    if high.is_nan() || high <= 0.0 {
        return vec![0.0, 1.0];
    }
    let rough = high / count.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * power);
    let steps = (high / step).ceil() as usize;
    (0..=steps).map(|n| n as f64 * step).collect()
}

/// Ticks at 1, 2 and 5 times the powers of ten (only at these where there are
/// many), from the last below `low` to the first above `high`.
pub(super) fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let low = low.max(f64::MIN_POSITIVE);
    let high = high.max(low);
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let factors: &[f64] = match powers.clone().count() {
        0..=4 => &[1.0, 2.0, 5.0],
        _ => &[1.0],
    };
    let all: Vec<f64> = powers
        .flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)))
        .collect();
    let first = all.iter().rposition(|tick| *tick <= low).unwrap_or(0);
    let last = all.iter().position(|tick| *tick >= high);
    let last = last.unwrap_or(all.len() - 1).max(first + 1);
    all.get(first..=last).map_or(all.clone(), <[f64]>::to_vec)
}

/// A tick's label: `20k`, `1.5`.
pub(super) fn label(value: f64) -> String {
    let short = |value: f64, unit: &str| {
        let text = format!("{value:.2}");
        let text = text.trim_end_matches('0').trim_end_matches('.');
        format!("{text}{unit}")
    };
    match value {
        millions if millions >= 1e6 => short(millions / 1e6, "M"),
        thousands if thousands >= 1e3 => short(thousands / 1e3, "k"),
        few => short(few, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_ticks_are_round_and_reach_the_top() {
        assert_eq!(linear_ticks(47_000.0, 5), [0.0, 1e4, 2e4, 3e4, 4e4, 5e4]);
        assert_eq!(linear_ticks(1.0, 4), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(linear_ticks(0.0, 4), [0.0, 1.0]);
    }

    #[test]
    fn log_ticks_enclose_the_values() {
        assert_eq!(log_ticks(1.05, 15.4), [1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(log_ticks(1.0, 1.0), [1.0, 2.0]);
        let many = log_ticks(0.3, 45_000.0);
        assert_eq!((many[0], many.last().copied()), (0.1, Some(1e5)));
    }

    #[test]
    fn values_find_their_places() {
        let axis = Axis::new((1.0, 100.0), true, (0.0, 10.0));
        assert!((axis.place(10.0) - 5.0).abs() < 1e-9);
        let axis = Axis::new((0.0, 100.0), false, (300.0, 0.0));
        assert!((axis.place(25.0) - 225.0).abs() < 1e-9);
        let axis = Axis::new((3.0, 3.0), false, (0.0, 10.0));
        assert_eq!(axis.place(3.0), 5.0);
    }

    #[test]
    fn labels_are_short() {
        let labels = [0.5, 5.0, 2500.0, 20_000.0, 1e6].map(label);
        assert_eq!(labels, ["0.5", "5", "2.5k", "20k", "1M"]);
    }
}
