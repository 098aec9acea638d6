//! Blink's hybrid of two classes of links, of which the second has a set-up time (appendix A.3).
//!
//! Data go over the fast links and over the slow links in two disjoint sets of trees. The slow
//! links need a set-up first (on GPUs: peer access is disabled, so that copies go over PCIe), whose
//! time is measured in the first calls. Both classes end at the same time:
//!
//! `D_slow / B_slow + T = D_fast / B_fast`, hence `D_slow = D·B_slow/(B_slow + B_fast) -
//! T·B_slow·B_fast/(B_slow + B_fast)`.
//!
//! Below `D = T·B_fast` this is negative: the fast links end before the slow links begin, and carry
//! all data.

/// The rates of both classes and the set-up time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    /// The rate over the fast links, in bytes a second.
    pub fast_bytes_per_s: u64,
    /// The rate over the slow links, in bytes a second.
    pub slow_bytes_per_s: u64,
    /// The time until the slow links can be used, in nanoseconds.
    pub setup_ns: u64,
}

/// The number of bytes for each class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Over the fast links.
    pub fast_bytes: u64,
    /// Over the slow ones.
    pub slow_bytes: u64,
}

const NS_PER_S: u128 = 1_000_000_000;

impl Classes {
    /// The split of the bytes by which both classes end at once, or all bytes over the fast class.
    /// Exact but for one byte.
    #[must_use]
    pub fn split(&self, bytes: u64) -> Split {
        let (fast, slow) = (u128::from(self.fast_bytes_per_s), u128::from(self.slow_bytes_per_s));
        // The amount that the fast links carry until the slow ones begin, in bytes · ns/s.
        let ahead = u128::from(self.setup_ns) * fast;
        let left = (u128::from(bytes) * NS_PER_S).saturating_sub(ahead);
        let slow_bytes = match fast + slow {
            0 => 0,
            both => wide_product_quotient(left, slow, both * NS_PER_S),
        };
        let slow_bytes = u64::try_from(slow_bytes).unwrap_or(bytes).min(bytes);
        Split { fast_bytes: bytes - slow_bytes, slow_bytes }
    }

    /// The time until both classes have ended for this split, in nanoseconds. The result is not
    /// rounded to an integer.
    #[must_use]
    pub fn time_ns(&self, split: Split) -> f64 {
        let over = |bytes: u64, bytes_per_s: u64| match bytes {
            0 => 0.0,
            bytes => bytes as f64 / bytes_per_s as f64 * NS_PER_S as f64,
        };
        let setup_ns = if split.slow_bytes == 0 { 0.0 } else { self.setup_ns as f64 };
        over(split.fast_bytes, self.fast_bytes_per_s)
            .max(setup_ns + over(split.slow_bytes, self.slow_bytes_per_s))
    }
}

/// `one · other / divisor`, where the product may not fit in 128 bits: `one` is divided first.
fn wide_product_quotient(one: u128, other: u128, divisor: u128) -> u128 {
    let (quotient, rest) = (one / divisor, one % divisor);
    let rest = rest.checked_mul(other).map_or_else(
        // At more than 2⁶⁴ bytes a second an error of one byte does not matter.
        || rest / (divisor / other.max(1)).max(1),
        |product| product / divisor,
    );
    quotient.saturating_mul(other).saturating_add(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB_PER_S: u64 = 1_000_000_000;

    #[test]
    fn little_data_wait_for_no_set_up() {
        let classes =
            Classes { fast_bytes_per_s: 48 * GB_PER_S, slow_bytes_per_s: 5 * GB_PER_S, setup_ns: 1_000_000 };
        assert_eq!(classes.split(48_000_000), Split { fast_bytes: 48_000_000, slow_bytes: 0 });
        assert!(classes.split(49_000_000).slow_bytes > 0);
    }

    #[test]
    fn without_a_price_each_class_carries_its_share() {
        let classes = Classes { fast_bytes_per_s: 3 * GB_PER_S, slow_bytes_per_s: GB_PER_S, setup_ns: 0 };
        assert_eq!(classes.split(4_000), Split { fast_bytes: 3_000, slow_bytes: 1_000 });
    }

    proptest::proptest! {
        #[test]
        fn both_classes_end_at_once_or_the_slow_one_is_not_worth_its_price(
            fast in 1..1_000_u64,
            slow in 1..1_000_u64,
            setup_ns in 0..10_000_000_u64,
            bytes in 0..1_u64 << 40,
        ) {
            let million = 1_000_000;
            let classes =
                Classes { fast_bytes_per_s: fast * million, slow_bytes_per_s: slow * million, setup_ns };
            let split = classes.split(bytes);
            proptest::prop_assert_eq!(split.fast_bytes + split.slow_bytes, bytes);
            let fast_ns = split.fast_bytes as f64 / (fast * million) as f64 * 1e9;
            let slow_ns = split.slow_bytes as f64 / (slow * million) as f64 * 1e9 + setup_ns as f64;
            // The longest time of one byte.
            let byte_ns = 1e9 / (fast.min(slow) * million) as f64;
            if split.slow_bytes == 0 {
                proptest::prop_assert!(fast_ns <= slow_ns + 2.0 * byte_ns);
            } else {
                proptest::prop_assert!((fast_ns - slow_ns).abs() <= 2.0 * byte_ns + 1e-6 * fast_ns);
            }
            let all_fast = Split { fast_bytes: bytes, slow_bytes: 0 };
            proptest::prop_assert!(classes.time_ns(split) <= classes.time_ns(all_fast) + 2.0 * byte_ns);
        }
    }
}
