//! The taxonomy of training schemes (Langer et al. 2020, with the axes of this library): each
//! scheme is a point of it, and a point is a scheme or is refused with the reason.

use std::fmt;

use super::{Direction, Mode, Peer, Refusal, Scheme};
use crate::compression::Compression;
use crate::policy::Reads;

/// The places of a scheme on all axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Axes {
    /// What is shared out over ranks.
    pub parallelism: Parallelism,
    /// Whether there is one model.
    pub state: State,
    /// How far ranks may be apart.
    pub timing: Timing,
    /// Through what ranks exchange.
    pub exchange: Exchange,
    /// What an exchange does.
    pub rule: ExchangeRule,
    /// In what form vectors travel.
    pub compression: Compression,
}

/// An axis whose values have names.
macro_rules! axis {
    ($(#[$doc:meta])* $type:ident { $($(#[$value_doc:meta])* $value:ident => $name:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $type { $($(#[$value_doc])* $value),* }

        impl $type {
            /// All values.
            pub const ALL: &[Self] = &[$(Self::$value),*];

            /// Its name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$value => $name),* }
            }
        }
    };
}

axis!(
    /// What is shared out over ranks.
    Parallelism {
        /// The data: each rank has the whole model.
        Data => "data",
        /// The model: each rank has a part of it, and sees all data.
        Model => "model",
        /// The model inside of groups, the data across them.
        Hybrid => "hybrid",
    }
);
axis!(
    /// Whether there is one model.
    State {
        /// All ranks work on one model, of which they have copies.
        Centralized => "centralized",
        /// Each rank has a model of its own.
        Decentralized => "decentralized",
    }
);
axis!(
    /// How far ranks may be apart.
    Timing {
        /// All make the same steps between exchanges, and wait for each other.
        Synchronous => "synchronous",
        /// A bound holds.
        Bounded => "bounded",
        /// None waits for another.
        Asynchronous => "asynchronous",
    }
);
axis!(
    /// Through what ranks exchange.
    Exchange {
        /// Operations of all ranks, or of all of a line.
        Collective => "collective",
        /// Vectors of which each rank owns a shard: a table, or a centre.
        Tables => "tables",
        /// Single peers.
        Peers => "peers",
    }
);
axis!(
    /// What an exchange does.
    ExchangeRule {
        /// Gradients are averaged.
        Gradients => "gradients",
        /// Changes are added.
        Changes => "changes",
        /// Parameters are averaged.
        Parameters => "parameters",
        /// What ranks have changed is averaged, and an outer optimizer steps by it.
        Outer => "outer",
        /// Parameters and an average or a centre are pulled together.
        Elastic => "elastic",
    }
);

impl Axes {
    /// Each point of the product of all axes.
    pub fn all() -> impl Iterator<Item = Self> {
        let of = |parallelism: Parallelism| {
            State::ALL.iter().flat_map(move |state| {
                Timing::ALL.iter().flat_map(move |timing| {
                    Exchange::ALL.iter().flat_map(move |exchange| {
                        ExchangeRule::ALL.iter().flat_map(move |rule| {
                            Compression::ALL.iter().map(move |compression| Self {
                                parallelism,
                                state: *state,
                                timing: *timing,
                                exchange: *exchange,
                                rule: *rule,
                                compression: *compression,
                            })
                        })
                    })
                })
            })
        };
        Parallelism::ALL.iter().copied().flat_map(of)
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parallelism, state, timing, exchange, rule, compression } = self;
        write!(
            formatter,
            "parallelism={} state={} timing={} exchange={} rule={} compression={}",
            parallelism.name(),
            state.name(),
            timing.name(),
            exchange.name(),
            rule.name(),
            compression.name()
        )
    }
}

impl Scheme {
    /// Its places on the axes.
    #[must_use]
    pub fn axes(&self) -> Axes {
        use Exchange::{Collective, Peers, Tables};
        use State::{Centralized, Decentralized};
        use Timing::{Asynchronous, Bounded, Synchronous};
        let (state, timing, exchange, rule) = match self {
            Self::Sync { .. } | Self::Hybrid { .. } => {
                (Centralized, Synchronous, Collective, ExchangeRule::Gradients)
            }
            Self::Eager { .. } => (Centralized, Bounded, Collective, ExchangeRule::Gradients),
            Self::LocalSgd { .. } => (Decentralized, Synchronous, Collective, ExchangeRule::Parameters),
            Self::Diloco { .. } => (Decentralized, Synchronous, Collective, ExchangeRule::Outer),
            Self::ElasticBsp { .. } => (Decentralized, Bounded, Collective, ExchangeRule::Parameters),
            Self::Gossip { direction: Direction::Pull, .. } | Self::Gossip { peer: Peer::Uniform, .. } => {
                (Decentralized, Asynchronous, Peers, ExchangeRule::Parameters)
            }
            // A rank waits for the one that writes to it.
            Self::Gossip { .. } => (Decentralized, Synchronous, Peers, ExchangeRule::Parameters),
            Self::Elastic { mode: Mode::Sync, .. } => {
                (Decentralized, Synchronous, Collective, ExchangeRule::Elastic)
            }
            Self::Elastic { mode: Mode::RoundRobin, .. } => {
                (Decentralized, Synchronous, Tables, ExchangeRule::Elastic)
            }
            Self::Elastic { mode: Mode::Async, .. } => {
                (Decentralized, Asynchronous, Tables, ExchangeRule::Elastic)
            }
            Self::Bidmach { threshold, .. } => {
                let timing = if *threshold < 1.0 { Bounded } else { Synchronous };
                (Decentralized, timing, Collective, ExchangeRule::Elastic)
            }
            Self::Asp | Self::Downpour { .. } => (Centralized, Asynchronous, Tables, ExchangeRule::Changes),
            Self::Ssp { .. } | Self::Dssp { .. } | Self::Bap { .. } => {
                (Centralized, Bounded, Tables, ExchangeRule::Changes)
            }
            Self::Bsp => (Centralized, Synchronous, Tables, ExchangeRule::Changes),
        };
        let parallelism = match self {
            Self::Hybrid { groups: Some(1) } => Parallelism::Model,
            Self::Hybrid { .. } => Parallelism::Hybrid,
            _ => Parallelism::Data,
        };
        let compression = self.compression();
        Axes { parallelism, state, timing, exchange, rule, compression }
    }

    /// In what form its vectors travel.
    fn compression(&self) -> Compression {
        match *self {
            Self::Sync { compression, .. }
            | Self::LocalSgd { compression, .. }
            | Self::Diloco { compression, .. } => compression,
            _ => Compression::None,
        }
    }

    /// The same scheme whose vectors travel in this form, if that is possible.
    fn compressed(mut self, form: Compression) -> Option<Self> {
        match &mut self {
            Self::Sync { compression, .. }
            | Self::LocalSgd { compression, .. }
            | Self::Diloco { compression, .. } => *compression = form,
            _ if form != Compression::None => return None,
            _ => {}
        }
        Some(self)
    }

    /// The plain scheme with these places on the axes, with its usual parameters.
    ///
    /// # Errors
    ///
    /// [`Refusal::Axes`]: there is none, and why not.
    pub fn new(axes: Axes) -> Result<Self, Refusal> {
        let refused = |reason| Refusal::Axes { axes, reason };
        if let Some(reason) = axes.not_yet() {
            return Err(refused(reason));
        }
        // Only synchronous gradients are left.
        match axes.parallelism {
            Parallelism::Data => {}
            Parallelism::Model => return Ok(Self::Hybrid { groups: Some(1) }),
            Parallelism::Hybrid => return Ok(Self::Hybrid { groups: None }),
        }
        let plain = Self::plain(axes).ok_or_else(|| refused(axes.reason_against()))?;
        plain.compressed(axes.compression).ok_or_else(|| {
            refused(
                "exchange=collective with compression: what rounding loses is kept only where all ranks average \
                 at once and rule is gradients, parameters or outer; take compression=none",
            )
        })
    }

    /// The plain scheme of data parallelism without compression.
    fn plain(axes: Axes) -> Option<Self> {
        use Exchange::{Collective, Peers, Tables};
        use State::{Centralized, Decentralized};
        use Timing::{Asynchronous, Bounded, Synchronous};
        let usual = |is: fn(&Self) -> bool| Self::ALL.into_iter().find(is);
        let elastic = |mode| Self::Elastic { every: 10, moving: 0.9, mode, momentum: None };
        let gossip = |direction, peer| Self::Gossip { direction, every: 1, peer, reads: Reads::Consistent };
        match (axes.state, axes.timing, axes.exchange, axes.rule) {
            (Centralized, Synchronous, Collective, ExchangeRule::Gradients) => {
                usual(|scheme| matches!(scheme, Self::Sync { .. }))
            }
            (Centralized, Bounded, Collective, ExchangeRule::Gradients) => {
                usual(|scheme| matches!(scheme, Self::Eager { .. }))
            }
            (Centralized, Synchronous, Tables, ExchangeRule::Changes) => Some(Self::Bsp),
            (Centralized, Bounded, Tables, ExchangeRule::Changes) => Some(Self::Ssp { staleness: 3 }),
            (Centralized, Asynchronous, Tables, ExchangeRule::Changes) => Some(Self::Asp),
            (Decentralized, Synchronous, Collective, ExchangeRule::Parameters) => {
                usual(|scheme| matches!(scheme, Self::LocalSgd { .. }))
            }
            (Decentralized, Synchronous, Collective, ExchangeRule::Outer) => {
                usual(|scheme| matches!(scheme, Self::Diloco { .. }))
            }
            (Decentralized, Bounded, Collective, ExchangeRule::Parameters) => {
                usual(|scheme| matches!(scheme, Self::ElasticBsp { .. }))
            }
            (Decentralized, Asynchronous, Peers, ExchangeRule::Parameters) => {
                Some(gossip(Direction::Pull, Peer::Uniform))
            }
            (Decentralized, Synchronous, Peers, ExchangeRule::Parameters) => {
                Some(gossip(Direction::Push, Peer::Ring))
            }
            (Decentralized, Synchronous, Collective, ExchangeRule::Elastic) => Some(elastic(Mode::Sync)),
            (Decentralized, Synchronous, Tables, ExchangeRule::Elastic) => Some(elastic(Mode::RoundRobin)),
            (Decentralized, Asynchronous, Tables, ExchangeRule::Elastic) => Some(elastic(Mode::Async)),
            (Decentralized, Bounded, Collective, ExchangeRule::Elastic) => {
                Some(Self::Bidmach { every: 1, rate: 0.3, dimensions: 2, threshold: 0.75 })
            }
            _ => None,
        }
    }
}

/// Where [`Scheme::Sync`] stands.
const SYNCHRONOUS: Axes = Axes {
    parallelism: Parallelism::Data,
    state: State::Centralized,
    timing: Timing::Synchronous,
    exchange: Exchange::Collective,
    rule: ExchangeRule::Gradients,
    compression: Compression::None,
};

impl Axes {
    /// Why no scheme shares its work out like this, or compresses like this.
    fn not_yet(&self) -> Option<&'static str> {
        let plain = Self { parallelism: self.parallelism, ..SYNCHRONOUS };
        match self.parallelism {
            Parallelism::Data => {}
            _ if *self == plain => return None,
            _ if (Self { compression: Compression::None, ..*self }) == plain => {
                return Some(
                    "parallelism=model or hybrid with compression: activations travel as they are, and error \
                     feedback of shards is not kept; take compression=none",
                );
            }
            Parallelism::Model => {
                return Some(
                    "parallelism=model: ranks have parts of one network, and each step needs all of them; take \
                     state=centralized, timing=synchronous, exchange=collective and rule=gradients, or \
                     parallelism=data",
                );
            }
            Parallelism::Hybrid => {
                return Some(
                    "parallelism=hybrid: the ranks of a group have parts of one network, and each step needs all \
                     of them; take state=centralized, timing=synchronous, exchange=collective and \
                     rule=gradients, or parallelism=data",
                );
            }
        }
        match self.exchange {
            _ if self.compression == Compression::None => None,
            Exchange::Tables => Some(
                "compression with exchange=tables: what is rounded away at each update is lost to the table; \
                 take compression=none",
            ),
            Exchange::Peers => Some(
                "compression with exchange=peers: nobody keeps the error of a vector that another reads; take \
                 compression=none",
            ),
            Exchange::Collective => None,
        }
    }

    /// Why there is no scheme with the other places: the most telling reason first.
    fn reason_against(&self) -> &'static str {
        use Exchange::{Collective, Peers, Tables};
        use State::{Centralized, Decentralized};
        use Timing::{Asynchronous, Bounded, Synchronous};
        match (self.state, self.timing, self.exchange, self.rule) {
            (_, Asynchronous, Collective, _) => {
                "timing=asynchronous over exchange=collective: an operation of all ranks waits for them; take peers \
                 or tables"
            }
            (_, Asynchronous | Bounded, _, ExchangeRule::Outer) => {
                "rule=outer without timing=synchronous: the momentum of the outer optimizer would count late \
                 changes again and again; take timing=synchronous over exchange=collective"
            }
            (_, Bounded, Collective, ExchangeRule::Changes) => {
                "timing=bounded over exchange=collective with rule=changes: nobody would hold the bound; take \
                 tables, or rule=gradients"
            }
            (_, Bounded, Peers, _) => {
                "timing=bounded over exchange=peers: nobody knows how far all ranks are; take tables"
            }
            (Centralized, _, Peers, _) => {
                "state=centralized over exchange=peers: no two ranks would have one model; take \
                 state=decentralized, or tables"
            }
            (_, _, Peers, _) => {
                "exchange=peers without rule=parameters: a change or a gradient of one rank would not come to all; \
                 take rule=parameters"
            }
            (Decentralized, _, _, ExchangeRule::Gradients | ExchangeRule::Changes) => {
                "state=decentralized with rule=gradients or changes: models of their own would move alike and stay \
                 apart; take state=centralized, or rule=parameters"
            }
            (Centralized, _, _, ExchangeRule::Parameters | ExchangeRule::Outer | ExchangeRule::Elastic) => {
                "state=centralized with rule=parameters, outer or elastic: with one model there is nothing to \
                 average or to pull together; take state=decentralized"
            }
            (_, _, Tables, ExchangeRule::Gradients) => {
                "exchange=tables with rule=gradients: a table adds what is given to it; take rule=changes"
            }
            (_, Synchronous, Collective, ExchangeRule::Changes) => {
                "exchange=collective with rule=changes: the average of changes is that of gradients; take \
                 rule=gradients, or tables"
            }
            (_, _, Tables, ExchangeRule::Parameters | ExchangeRule::Outer) => {
                "exchange=tables with rule=parameters or outer: an average of all ranks waits for all; take \
                 exchange=collective"
            }
            (_, Bounded, Tables, ExchangeRule::Elastic) => {
                "timing=bounded over exchange=tables with rule=elastic: a centre bounds how far models are apart, \
                 and no time; take timing=asynchronous or synchronous"
            }
            _ => "the places contradict each other; take those of a scheme of pleach train --schemes",
        }
    }
}
