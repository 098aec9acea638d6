//! The text of a scheme: `NAME[:KEY=VALUE,…]`. What is left out has its usual value.

use std::fmt;
use std::str::FromStr;

use pleach_collectives::partial::{Divisor, Late};
use pleach_vocabulary::nearest;

use super::{Direction, Fragments, Mode, Peer, Scheme};
use crate::compression::Compression;
use crate::parallelize::OrderRule;
use crate::policy::Reads;
use crate::zipline::{Objective, Predictor};

/// Why a text names no scheme.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchemeTextError {
    /// No scheme has this name.
    #[error("no such scheme: '{name}'{}; there are {}", meant(*.nearest), names())]
    Scheme {
        /// The name.
        name: String,
        /// The scheme that was probably meant.
        nearest: Option<&'static str>,
    },
    /// The scheme has no such key.
    #[error("no such key of {scheme}: '{key}'{}; there are {}", meant(*.nearest), keys_of(.scheme))]
    Key {
        /// The scheme.
        scheme: &'static str,
        /// The key.
        key: String,
        /// The key that was probably meant.
        nearest: Option<&'static str>,
    },
    /// The value is none of this key.
    #[error("bad value of {key}: '{value}' (scheme {scheme}); give {expected}")]
    Value {
        /// The scheme.
        scheme: &'static str,
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The values that there are.
        expected: &'static str,
    },
    /// A part is not of the form `KEY=VALUE`.
    #[error("not of the form KEY=VALUE: '{part}' (scheme {scheme}); give keys of {}", keys_of(.scheme))]
    Form {
        /// The scheme.
        scheme: &'static str,
        /// The part.
        part: String,
    },
    /// A key is given twice.
    #[error("given twice: '{key}' (scheme {scheme}); give it once")]
    Repeated {
        /// The scheme.
        scheme: &'static str,
        /// The key.
        key: &'static str,
    },
}

fn meant(nearest: Option<&'static str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!(", did you mean '{nearest}'?"))
}

fn names() -> String {
    Scheme::ALL.map(|scheme| scheme.name()).join(" ")
}

fn keys_of(name: &str) -> String {
    let scheme = Scheme::ALL.into_iter().find(|scheme| scheme.name() == name);
    let keys = scheme.map_or(&[][..], |scheme| scheme.keys());
    keys.iter().map(|key| key.name).collect::<Vec<_>>().join(" ")
}

/// A key and the values that it takes, in words.
#[derive(Debug)]
struct Key {
    name: &'static str,
    expected: &'static str,
}

const STEPS: &str = "a number of steps, at least 1";
const PART: &str = "a number above 0, at most 1";
const SHARE: &str = "a number from 0 to below 1";

/// A value with its name.
type Named<T> = &'static [(&'static str, T)];

const DIRECTIONS: Named<Direction> =
    &[("pull", Direction::Pull), ("push", Direction::Push), ("push-sum", Direction::PushSum)];
const PEERS: Named<Peer> =
    &[("uniform", Peer::Uniform), ("butterfly", Peer::Butterfly), ("ring", Peer::Ring)];
const MODES: Named<Mode> = &[("async", Mode::Async), ("sync", Mode::Sync), ("round-robin", Mode::RoundRobin)];
const READS: Named<Reads> = &[("consistent", Reads::Consistent), ("torn", Reads::Torn)];
const LATES: Named<Late> = &[("carry", Late::Carry), ("drop", Late::Drop), ("correct", Late::Correct)];
const DIVISORS: Named<Divisor> =
    &[("world", Divisor::World), ("contributors", Divisor::Contributors), ("none", Divisor::None)];
const OBJECTIVES: Named<Objective> = &[("share", Objective::Share), ("range", Objective::Range)];
const PREDICTIONS: Named<Predictor> = &[("mean", Predictor::Mean), ("last", Predictor::Last)];

const ORDERS: Named<OrderRule> = &[("planned", OrderRule::Planned), ("fifo", OrderRule::Fifo)];

const COMPRESSIONS: Named<Compression> = &[
    (Compression::None.name(), Compression::None),
    (Compression::Bf16.name(), Compression::Bf16),
    (Compression::F8.name(), Compression::F8),
];

fn of_name<T: Copy>(all: Named<T>, name: &str) -> Option<T> {
    all.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

fn name_of<T: PartialEq>(all: Named<T>, value: &T) -> String {
    all.iter().find(|(_, known)| known == value).map_or_else(String::new, |(name, _)| (*name).to_owned())
}

/// Groups that are chosen.
const AUTO: &str = "auto";
const LAYERS: &str = "layers";

const COMPRESS: Key = Key { name: "compress", expected: "none, bf16 or f8" };

/// Those of `eamsgd`; `easgd` has no momentum.
const ELASTIC: &[Key] = &[
    Key { name: "every", expected: STEPS },
    Key { name: "moving", expected: "a number above 0" },
    Key { name: "mode", expected: "async, sync or round-robin" },
    Key { name: "momentum", expected: SHARE },
];

impl Scheme {
    fn keys(&self) -> &'static [Key] {
        match self {
            Self::Sync { .. } => &[
                Key { name: "bucket", expected: "bytes, at least 4, as 64K or 1M" },
                Key { name: "order", expected: "planned or fifo" },
                COMPRESS,
            ],
            Self::Hybrid { .. } => &[Key {
                name: "groups",
                expected: "auto, or a number of groups that divides the number of ranks",
            }],
            Self::LocalSgd { .. } => &[
                Key { name: "every", expected: STEPS },
                Key { name: "warmup", expected: "a number of steps" },
                COMPRESS,
            ],
            Self::Diloco { .. } => &[
                Key { name: "every", expected: STEPS },
                Key { name: "outer-lr", expected: "a number above 0" },
                Key { name: "outer-momentum", expected: SHARE },
                Key { name: "fragments", expected: "layers, or a number of parts, at least 1" },
                Key { name: "delay", expected: "a number of steps" },
                Key { name: "mix", expected: SHARE },
                COMPRESS,
            ],
            Self::Gossip { .. } => &[
                Key { name: "direction", expected: "pull, push or push-sum" },
                Key { name: "every", expected: STEPS },
                Key { name: "peer", expected: "uniform, butterfly or ring" },
                Key { name: "reads", expected: "consistent or torn, with direction=pull" },
            ],
            Self::Elastic { momentum: None, .. } => ELASTIC.split_at(3).0,
            Self::Elastic { .. } => ELASTIC,
            Self::Downpour { .. } => &[Key { name: "every", expected: STEPS }],
            Self::Ssp { .. } => &[Key { name: "staleness", expected: "a number of steps" }],
            Self::Bsp | Self::Asp => &[],
            Self::Dssp { .. } => &[
                Key { name: "low", expected: "a number of steps" },
                Key { name: "high", expected: "a number of steps, at least low" },
            ],
            Self::Bap { .. } => &[Key { name: "distance", expected: "a number of updates, at least 1" }],
            Self::Eager { .. } => &[
                Key {
                    name: "activation",
                    expected: "all, solo, majority, quorum:K, quorum:K+GRACE, deadline:D or deadline:pN",
                },
                Key { name: "late", expected: "carry, drop or correct" },
                Key { name: "divisor", expected: "world, contributors or none" },
                Key { name: "every", expected: STEPS },
            ],
            Self::Bidmach { .. } => &[
                Key { name: "every", expected: STEPS },
                Key { name: "rate", expected: PART },
                Key { name: "dimensions", expected: "a number from 1 to 32" },
                Key { name: "threshold", expected: PART },
            ],
            Self::ElasticBsp { .. } => &[
                Key { name: "lookahead", expected: STEPS },
                Key { name: "objective", expected: "share or range" },
                Key { name: "prediction", expected: "mean or last" },
            ],
        }
    }

    fn value(&self, key: &str) -> String {
        match (self, key) {
            (
                Self::Sync { compression, .. }
                | Self::LocalSgd { compression, .. }
                | Self::Diloco { compression, .. },
                "compress",
            ) => name_of(COMPRESSIONS, compression),
            (Self::Sync { order, .. }, "order") => name_of(ORDERS, order),
            (Self::Sync { bucket_bytes, .. }, _) => size_text(*bucket_bytes),
            (Self::Hybrid { groups }, _) => {
                groups.map_or_else(|| AUTO.to_owned(), |groups| groups.to_string())
            }
            (Self::LocalSgd { warmup, .. }, "warmup") => warmup.to_string(),
            (Self::Diloco { outer_learning_rate, .. }, "outer-lr") => outer_learning_rate.to_string(),
            (Self::Diloco { outer_momentum, .. }, "outer-momentum") => outer_momentum.to_string(),
            (Self::Diloco { fragments: Fragments::Layers, .. }, "fragments") => LAYERS.to_owned(),
            (Self::Diloco { fragments: Fragments::Parts(count), .. }, "fragments") => count.to_string(),
            (Self::Diloco { delay, .. }, "delay") => delay.to_string(),
            (Self::Diloco { mix, .. }, "mix") => mix.to_string(),
            (Self::Ssp { staleness }, _) => staleness.to_string(),
            (Self::Bsp | Self::Asp, _) => String::new(),
            (Self::Dssp { low, .. }, "low") => low.to_string(),
            (Self::Dssp { high, .. }, _) => high.to_string(),
            (Self::Bap { distance }, _) => distance.to_string(),
            (Self::Eager { activation, .. }, "activation") => activation.to_string(),
            (Self::Eager { late, .. }, "late") => late.to_string(),
            (Self::Eager { divisor, .. }, "divisor") => divisor.to_string(),
            (Self::Bidmach { rate, .. }, "rate") => rate.to_string(),
            (Self::Bidmach { dimensions, .. }, "dimensions") => dimensions.to_string(),
            (Self::Bidmach { threshold, .. }, "threshold") => threshold.to_string(),
            (Self::ElasticBsp { lookahead, .. }, "lookahead") => lookahead.to_string(),
            (Self::ElasticBsp { objective, .. }, "objective") => name_of(OBJECTIVES, objective),
            (Self::ElasticBsp { prediction, .. }, _) => name_of(PREDICTIONS, prediction),
            (Self::Gossip { direction, .. }, "direction") => name_of(DIRECTIONS, direction),
            (Self::Gossip { peer, .. }, "peer") => name_of(PEERS, peer),
            (Self::Gossip { reads, .. }, "reads") => name_of(READS, reads),
            (Self::Elastic { moving, .. }, "moving") => moving.to_string(),
            (Self::Elastic { mode, .. }, "mode") => name_of(MODES, mode),
            (Self::Elastic { momentum, .. }, "momentum") => momentum.unwrap_or_default().to_string(),
            (
                Self::LocalSgd { every, .. }
                | Self::Diloco { every, .. }
                | Self::Gossip { every, .. }
                | Self::Elastic { every, .. }
                | Self::Eager { every, .. }
                | Self::Bidmach { every, .. }
                | Self::Downpour { every },
                _,
            ) => every.to_string(),
        }
    }

    /// Takes a value; `None` if it is none of this key.
    fn take(&mut self, key: &str, value: &str) -> Option<()> {
        match (self, key) {
            (
                Self::Sync { compression, .. }
                | Self::LocalSgd { compression, .. }
                | Self::Diloco { compression, .. },
                "compress",
            ) => *compression = of_name(COMPRESSIONS, value)?,
            (Self::Sync { order, .. }, "order") => *order = of_name(ORDERS, value)?,
            (Self::Sync { bucket_bytes, .. }, _) => {
                *bucket_bytes = size(value).filter(|bytes| *bytes >= size_of::<f32>())?;
            }
            (Self::Hybrid { groups }, _) if value == AUTO => *groups = None,
            (Self::Hybrid { groups }, _) => {
                *groups = Some(value.parse().ok().filter(|groups| *groups >= 1)?);
            }
            (Self::LocalSgd { warmup, .. }, "warmup") => *warmup = value.parse().ok()?,
            (Self::Diloco { outer_learning_rate, .. }, "outer-lr") => {
                *outer_learning_rate = number(value).filter(|rate| *rate > 0.0)?;
            }
            (Self::Diloco { outer_momentum, .. }, "outer-momentum") => {
                *outer_momentum = number(value).filter(|momentum| (0.0..1.0).contains(momentum))?;
            }
            (Self::Diloco { fragments, .. }, "fragments") => {
                *fragments = match value {
                    LAYERS => Fragments::Layers,
                    count => Fragments::Parts(count.parse().ok().filter(|count| *count >= 1)?),
                };
            }
            (Self::Diloco { delay, .. }, "delay") => *delay = value.parse().ok()?,
            (Self::Diloco { mix, .. }, "mix") => {
                *mix = number(value).filter(|mix| (0.0..1.0).contains(mix))?;
            }
            (Self::Ssp { staleness }, _) => *staleness = value.parse().ok()?,
            (Self::Bsp | Self::Asp, _) => return None,
            (Self::Dssp { low, .. }, "low") => *low = value.parse().ok()?,
            (Self::Dssp { high, .. }, _) => *high = value.parse().ok()?,
            (Self::Bap { distance }, _) => {
                *distance = value.parse().ok().filter(|distance| *distance >= 1)?;
            }
            (Self::Eager { activation, .. }, "activation") => *activation = value.parse().ok()?,
            (Self::Eager { late, .. }, "late") => *late = of_name(LATES, value)?,
            (Self::Eager { divisor, .. }, "divisor") => *divisor = of_name(DIVISORS, value)?,
            (Self::Bidmach { rate, .. }, "rate") => *rate = number(value).filter(is_part)?,
            (Self::Bidmach { dimensions, .. }, "dimensions") => {
                *dimensions = value.parse().ok().filter(|dimensions| (1..=32).contains(dimensions))?;
            }
            (Self::Bidmach { threshold, .. }, "threshold") => *threshold = number(value).filter(is_part)?,
            (Self::ElasticBsp { lookahead, .. }, "lookahead") => {
                *lookahead = value.parse().ok().filter(|lookahead| *lookahead >= 1)?;
            }
            (Self::ElasticBsp { objective, .. }, "objective") => *objective = of_name(OBJECTIVES, value)?,
            (Self::ElasticBsp { prediction, .. }, _) => *prediction = of_name(PREDICTIONS, value)?,
            (Self::Gossip { direction, .. }, "direction") => *direction = of_name(DIRECTIONS, value)?,
            (Self::Gossip { peer, .. }, "peer") => *peer = of_name(PEERS, value)?,
            (Self::Gossip { reads, .. }, "reads") => *reads = of_name(READS, value)?,
            (Self::Elastic { moving, .. }, "moving") => {
                *moving = number(value).filter(|moving| *moving > 0.0)?;
            }
            (Self::Elastic { mode, .. }, "mode") => *mode = of_name(MODES, value)?,
            (Self::Elastic { momentum, .. }, "momentum") => {
                *momentum = Some(number(value).filter(|momentum| (0.0..1.0).contains(momentum))?);
            }
            (
                Self::LocalSgd { every, .. }
                | Self::Diloco { every, .. }
                | Self::Gossip { every, .. }
                | Self::Elastic { every, .. }
                | Self::Eager { every, .. }
                | Self::Bidmach { every, .. }
                | Self::Downpour { every },
                _,
            ) => {
                *every = value.parse().ok().filter(|every| *every >= 1)?;
            }
        }
        Some(())
    }
}

fn is_part(number: &f32) -> bool {
    *number > 0.0 && *number <= 1.0
}

fn number(text: &str) -> Option<f32> {
    text.parse().ok().filter(|number: &f32| number.is_finite())
}

/// The units of sizes, the largest first.
const UNITS: [(&str, usize); 3] = [("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

fn size(text: &str) -> Option<usize> {
    let unit = UNITS.into_iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, bytes)));
    let (digits, bytes) = unit.unwrap_or((text, 1));
    digits.parse::<usize>().ok()?.checked_mul(bytes)
}

fn size_text(bytes: usize) -> String {
    let unit = UNITS.into_iter().find(|(_, unit)| bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
}

impl FromStr for Scheme {
    type Err = SchemeTextError;

    fn from_str(text: &str) -> Result<Self, SchemeTextError> {
        let (name, list) = text.split_once(':').map_or((text, None), |(name, list)| (name, Some(list)));
        let mut scheme = Self::ALL.into_iter().find(|scheme| scheme.name() == name).ok_or_else(|| {
            let nearest = nearest(name, Self::ALL.iter().map(Self::name));
            SchemeTextError::Scheme { name: name.to_owned(), nearest }
        })?;
        let (name, keys) = (scheme.name(), scheme.keys());
        let mut given: Vec<&str> = Vec::new();
        for part in list.into_iter().flat_map(|list| list.split(',')) {
            let form = || SchemeTextError::Form { scheme: name, part: part.to_owned() };
            let (key, value) = part.split_once('=').ok_or_else(form)?;
            let Some(key) = keys.iter().find(|known| known.name == key) else {
                let nearest = nearest(key, keys.iter().map(|known| known.name));
                return Err(SchemeTextError::Key { scheme: name, key: key.to_owned(), nearest });
            };
            if given.contains(&key.name) {
                return Err(SchemeTextError::Repeated { scheme: name, key: key.name });
            }
            given.push(key.name);
            scheme.take(key.name, value).ok_or_else(|| SchemeTextError::Value {
                scheme: name,
                key: key.name,
                value: value.to_owned(),
                expected: key.expected,
            })?;
        }
        // What no key can see by itself.
        let contradicted = match scheme {
            Self::Dssp { low, high } if low > high => Some("high"),
            Self::Gossip { direction, reads: Reads::Torn, .. } if direction != Direction::Pull => {
                Some("reads")
            }
            _ => None,
        };
        if let Some(key) = contradicted.and_then(|name| keys.iter().find(|key| key.name == name)) {
            let (value, expected) = (scheme.value(key.name), key.expected);
            return Err(SchemeTextError::Value { scheme: name, key: key.name, value, expected });
        }
        Ok(scheme)
    }
}

impl Scheme {
    /// Its text with the values of all keys, usual or not.
    #[must_use]
    pub fn text_with_all_keys(&self) -> String {
        let keys = self.keys().iter().map(|key| format!("{}={}", key.name, self.value(key.name)));
        let keys: Vec<String> = keys.collect();
        if keys.is_empty() { self.name().to_owned() } else { format!("{}:{}", self.name(), keys.join(",")) }
    }
}

/// The text without the values that are the usual ones.
impl fmt::Display for Scheme {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())?;
        let usual = Self::ALL.into_iter().find(|scheme| scheme.name() == self.name());
        let usual = usual.expect("each scheme is among all");
        let changed = self.keys().iter().map(|key| (key.name, self.value(key.name)));
        let changed = changed.filter(|(key, value)| *value != usual.value(key));
        for (number, (key, value)) in changed.enumerate() {
            write!(formatter, "{}{key}={value}", if number == 0 { ':' } else { ',' })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use pleach_collectives::partial::Activation;

    use super::*;

    fn sync(bucket_bytes: usize, order: OrderRule, compression: Compression) -> Scheme {
        Scheme::Sync { bucket_bytes, order, compression }
    }

    fn error(text: &str) -> SchemeTextError {
        text.parse::<Scheme>().expect_err("is no scheme")
    }

    #[test]
    fn fragments_are_the_layers_or_a_number_of_parts() {
        for (text, expected) in
            [("diloco:fragments=layers", Fragments::Layers), ("diloco:fragments=2", Fragments::Parts(2))]
        {
            let scheme: Scheme = text.parse().expect("a scheme");
            assert!(
                matches!(scheme, Scheme::Diloco { fragments, .. } if fragments == expected),
                "{scheme:?}"
            );
            assert_eq!(scheme.to_string(), text);
        }
    }

    fn gossip(direction: Direction, peer: Peer, reads: Reads) -> Scheme {
        Scheme::Gossip { direction, every: 1, peer, reads }
    }

    #[test]
    fn what_is_left_out_has_its_usual_value_and_the_text_leaves_it_out_again() {
        for (text, scheme) in [
            ("sync", sync(1 << 20, OrderRule::Planned, Compression::None)),
            ("sync:bucket=64K,compress=bf16", sync(64 << 10, OrderRule::Planned, Compression::Bf16)),
            ("sync:bucket=1000,order=fifo", sync(1000, OrderRule::Fifo, Compression::None)),
            ("local-sgd", Scheme::LocalSgd { every: 8, warmup: 0, compression: Compression::None }),
            (
                "local-sgd:every=1,warmup=20,compress=f8",
                Scheme::LocalSgd { every: 1, warmup: 20, compression: Compression::F8 },
            ),
            (
                "gossip:direction=push-sum,peer=butterfly",
                gossip(Direction::PushSum, Peer::Butterfly, Reads::Consistent),
            ),
            (
                "easgd:moving=0.5,mode=round-robin",
                Scheme::Elastic { every: 10, moving: 0.5, mode: Mode::RoundRobin, momentum: None },
            ),
            (
                "eamsgd:every=4,momentum=0.99",
                Scheme::Elastic { every: 4, moving: 0.9, mode: Mode::Async, momentum: Some(0.99) },
            ),
            ("downpour:every=5", Scheme::Downpour { every: 5 }),
            ("hybrid", Scheme::Hybrid { groups: None }),
            ("hybrid:groups=2", Scheme::Hybrid { groups: Some(2) }),
            ("ssp:staleness=0", Scheme::Ssp { staleness: 0 }),
            ("bsp", Scheme::Bsp),
            ("asp", Scheme::Asp),
            ("dssp:low=1,high=4", Scheme::Dssp { low: 1, high: 4 }),
            ("bap:distance=9", Scheme::Bap { distance: 9 }),
            ("gossip:reads=torn", gossip(Direction::Pull, Peer::Uniform, Reads::Torn)),
            (
                "eager:activation=quorum:3+20ms,late=drop,divisor=contributors,every=5",
                Scheme::Eager {
                    activation: Activation::quorum(3).grace(std::time::Duration::from_millis(20)),
                    late: Late::Drop,
                    divisor: Divisor::Contributors,
                    every: 5,
                },
            ),
            (
                "eager:divisor=none",
                Scheme::Eager {
                    activation: Activation::MAJORITY,
                    late: Late::Carry,
                    divisor: Divisor::None,
                    every: 100,
                },
            ),
            (
                "bidmach:rate=0.5,dimensions=3,threshold=0.75",
                Scheme::Bidmach { every: 1, rate: 0.5, dimensions: 3, threshold: 0.75 },
            ),
            (
                "elastic-bsp:lookahead=15,objective=range,prediction=last",
                Scheme::ElasticBsp {
                    lookahead: 15,
                    objective: Objective::Range,
                    prediction: Predictor::Last,
                },
            ),
            (
                "diloco:fragments=4,delay=2,mix=0.5",
                Scheme::Diloco {
                    every: 50,
                    outer_learning_rate: 0.7,
                    outer_momentum: 0.9,
                    fragments: Fragments::Parts(4),
                    delay: 2,
                    mix: 0.5,
                    compression: Compression::None,
                },
            ),
            (
                "diloco:outer-lr=1,outer-momentum=0",
                Scheme::Diloco {
                    every: 50,
                    outer_learning_rate: 1.0,
                    outer_momentum: 0.0,
                    fragments: Fragments::Parts(1),
                    delay: 0,
                    mix: 0.0,
                    compression: Compression::None,
                },
            ),
        ] {
            assert_eq!(text.parse(), Ok(scheme));
            assert_eq!(scheme.to_string(), text);
        }
        for scheme in Scheme::ALL {
            assert_eq!(scheme.text_with_all_keys().parse(), Ok(scheme));
        }
        assert_eq!("local-sgd:every=8".parse::<Scheme>().expect("is one").to_string(), "local-sgd");
    }

    #[test]
    fn the_nearest_name_and_key_are_named() {
        let SchemeTextError::Scheme { nearest, .. } = error("local-sdg:every=2") else { panic!("a name") };
        assert_eq!(nearest, Some("local-sgd"));
        let SchemeTextError::Key { nearest, .. } = error("diloco:outer_lr=1") else { panic!("a key") };
        assert_eq!(nearest, Some("outer-lr"));
        let message = error("xyz").to_string();
        assert_eq!(
            message,
            "no such scheme: 'xyz'; there are sync hybrid local-sgd diloco gossip easgd eamsgd downpour ssp bsp dssp bap asp eager bidmach elastic-bsp"
        );
        let SchemeTextError::Key { nearest, .. } = error("easgd:momentum=0.5") else { panic!("a key") };
        assert_eq!(nearest, None, "easgd has no momentum");
        let message = error("diloco:pieces=4").to_string();
        assert!(
            message.ends_with("there are every outer-lr outer-momentum fragments delay mix compress"),
            "{message}"
        );
    }

    #[test]
    fn values_that_are_none_are_refused_with_those_that_are() {
        for text in [
            "sync:bucket=3",
            "sync:bucket=-1",
            "sync:compress=f16",
            "sync:order=lifo",
            "sync:bucket=99999999999G",
            "hybrid:groups=0",
            "hybrid:groups=all",
            "local-sgd:every=0",
            "local-sgd:warmup=-1",
            "diloco:outer-lr=0",
            "diloco:outer-lr=nan",
            "diloco:outer-momentum=1",
            "diloco:fragments=0",
            "diloco:mix=1",
            "diloco:every=",
            "gossip:direction=pul",
            "gossip:peer=all",
            "easgd:moving=0",
            "easgd:mode=robin",
            "eamsgd:momentum=1",
            "downpour:every=0",
            "dssp:low=4,high=3",
            "dssp:high=x",
            "bap:distance=0",
            "gossip:direction=push,reads=torn",
            "gossip:reads=both",
            "eager:activation=most",
            "eager:late=never",
            "eager:divisor=nobody",
            "eager:every=0",
            "bidmach:rate=0",
            "bidmach:threshold=1.5",
            "bidmach:dimensions=0",
            "elastic-bsp:lookahead=0",
            "elastic-bsp:objective=least",
        ] {
            let SchemeTextError::Value { value, expected, .. } = error(text) else {
                panic!("{text}: a value")
            };
            assert!(text.ends_with(&value) && error(text).to_string().ends_with(expected), "{text}");
        }
        assert!(matches!(error("sync:"), SchemeTextError::Form { .. }));
        assert!(matches!(error("sync:bucket"), SchemeTextError::Form { .. }));
        assert!(matches!(error("local-sgd:every=2,every=3"), SchemeTextError::Repeated { .. }));
    }
}
