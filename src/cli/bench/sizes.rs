//! Sizes as people write them, and the sweep over them.

use std::fmt;
use std::str::FromStr;

use pleach::DataType;

/// Largest size, in bytes.
const BYTES_MAX: u64 = 1 << 40;

/// A number of bytes, written with K, M or G for 2^10, 2^20, 2^30.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cli) struct Size(pub(in crate::cli) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, shift) = match text.bytes().last() {
            Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
            Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
            Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
            _ => (text, 0),
        };
        let number: Option<u64> = digits.parse().ok().filter(|_| !digits.starts_with('+'));
        number
            .and_then(|number| number.checked_mul(1 << shift))
            .filter(|bytes| *bytes <= BYTES_MAX)
            .map(Self)
            .ok_or_else(|| "write a number of bytes up to 1024G, such as 8, 64K, 16M or 1G".to_owned())
    }
}

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => formatter.write_str("0"),
            bytes if bytes.is_multiple_of(1 << 30) => write!(formatter, "{}G", bytes >> 30),
            bytes if bytes.is_multiple_of(1 << 20) => write!(formatter, "{}M", bytes >> 20),
            bytes if bytes.is_multiple_of(1 << 10) => write!(formatter, "{}K", bytes >> 10),
            bytes => write!(formatter, "{bytes}"),
        }
    }
}

/// The sizes to measure.
#[derive(Clone, Debug)]
pub(super) struct Sweep {
    sizes: Vec<u64>,
}

/// Why there is no such sweep.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SweepError {
    #[error("bad sizes: --min {min} is larger than --max {max}; exchange them")]
    Order { min: Size, max: Size },
    #[error(
        "bad size: --{argument} {size} is not a multiple of {element} bytes, those of {data_type}; the nearest is {nearest}"
    )]
    Multiple { argument: &'static str, size: Size, element: u64, data_type: DataType, nearest: u64 },
}

impl Sweep {
    /// From `min` by `factor`, and `max` itself.
    pub(super) fn new(min: Size, max: Size, factor: u64, data_type: DataType) -> Result<Self, SweepError> {
        let element = data_type.bytes() as u64;
        check("min", min, data_type)?;
        check("max", max, data_type)?;
        if min > max {
            return Err(SweepError::Order { min, max });
        }
        let next = |size: &u64| match *size {
            0 => Some(element),
            size => size.checked_mul(factor),
        };
        let mut sizes: Vec<u64> =
            std::iter::successors(Some(min.0), next).take_while(|size| *size <= max.0).collect();
        if sizes.last() != Some(&max.0) {
            sizes.push(max.0);
        }
        Ok(Self { sizes })
    }

    /// These, in this order.
    pub(super) fn of(sizes: &[Size], data_type: DataType) -> Result<Self, SweepError> {
        sizes.iter().try_for_each(|size| check("sizes", *size, data_type))?;
        Ok(Self { sizes: sizes.iter().map(|size| size.0).collect() })
    }

    /// For what has no data: once.
    pub(super) fn empty() -> Self {
        Self { sizes: vec![0] }
    }

    /// In bytes.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> + '_ {
        self.sizes.iter().copied()
    }
}

/// A size is one of whole elements.
fn check(argument: &'static str, size: Size, data_type: DataType) -> Result<(), SweepError> {
    let element = data_type.bytes() as u64;
    if size.0.is_multiple_of(element) {
        return Ok(());
    }
    let nearest = (size.0 + element / 2) / element * element;
    Err(SweepError::Multiple { argument, size, element, data_type, nearest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(min: &str, max: &str, factor: u64) -> Vec<u64> {
        let [min, max] = [min, max].map(|text| text.parse().expect("a size"));
        Sweep::new(min, max, factor, DataType::F32).expect("a sweep").sizes().collect()
    }

    #[test]
    fn sizes_take_letters_and_print_as_they_are_written() {
        for (text, bytes) in [("8", 8), ("1K", 1024), ("64M", 64 << 20), ("3g", 3 << 30), ("0", 0)] {
            let size: Size = text.parse().expect(text);
            assert_eq!(size, Size(bytes));
            assert_eq!(size.to_string(), text.to_uppercase());
        }
        for text in ["", "K", "-8", "+8", "1.5M", "8 ", "1T", "99999999999G", "2M2", "\u{e9}"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_sweep_goes_by_its_factor_and_ends_with_the_largest() {
        assert_eq!(sweep("8", "128", 4), [8, 32, 128]);
        assert_eq!(sweep("8", "100", 4), [8, 32, 100]);
        assert_eq!(sweep("0", "8", 2), [0, 4, 8]);
        assert_eq!(sweep("64M", "64M", 4), [64 << 20]);
        assert_eq!(sweep("512G", "1024G", u64::MAX), [512 << 30, 1 << 40]);
    }

    #[test]
    fn what_is_no_sweep_is_refused_with_what_to_write() {
        let error = Sweep::new(Size(10), Size(64), 4, DataType::F32).expect_err("10 is no multiple of 4");
        assert!(error.to_string().ends_with("the nearest is 12"), "{error}");
        let error = Sweep::of(&[Size(8), Size(9)], DataType::F32).expect_err("9 is no multiple of 4");
        assert!(error.to_string().contains("--sizes 9 is not a multiple of 4 bytes"), "{error}");
        let error = Sweep::new(Size(16), Size(8), 4, DataType::F32).expect_err("in the wrong order");
        assert!(matches!(error, SweepError::Order { .. }));
    }
}
