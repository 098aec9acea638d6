//! Tables of choices: which way a collective goes for so many bytes, as it was measured in a world,
//! to be looked at, kept in a file and pinned.
//!
//! A [`Table`] is for one world: a fabric and the ranks on their hosts. Its [`Row`]s say from how
//! many bytes on a collective goes which [`Way`]; the [`CostModel`]s fitted to the same
//! measurements serve for what has no row. [`Choices`] are the tables of a file, whose form is
//! [`Choices`]' own text (see `text`). [`tune`] makes rows of measurements; `pleach tune` measures.
//!
//! **Invariants:** every row of a table can be carried out in the table's world; rows of a
//! collective come by size and begin at 0; and two ranks whose choices have the same digest choose
//! alike.

pub mod chunks;
mod error;
mod text;
pub mod tune;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pleach_vocabulary::Fabric;

pub use error::{ChoicesError, LineError, Misplaced};

use pleach_vocabulary::Collective;

use crate::cost::{CostModel, Platform};
use crate::generate::Way;
use crate::hosts::HostMap;
use crate::select::{SelectError, select_way};

/// Names the file of [`Pinned::File`].
pub const CHOICES_VARIABLE: &str = "PLEACH_CHOICES";

/// Most bytes of a file of choices.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// From how many bytes on a collective goes which way.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Which; its root does not matter.
    pub collective: Collective,
    /// From so many bytes on, as [`whole_bytes`] counts them. They are told apart by powers of two.
    pub from_bytes: u64,
    /// Which way.
    pub way: Way,
    /// What was measured; only for people.
    pub note: Option<Note>,
}

/// What was measured at the first size of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// The size.
    pub bytes: u64,
    /// How long the row's way took, in seconds.
    pub seconds: f64,
    /// What came next, and how long that took.
    pub next: Option<(Way, f64)>,
}

/// What was measured in one world; see the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    fabric: Fabric,
    hosts: HostMap,
    models: Option<(CostModel, CostModel)>,
    rows: Vec<Row>,
}

impl Table {
    /// Without rows yet, for ranks of these hosts over this fabric.
    #[must_use]
    pub fn new(fabric: Fabric, hosts: HostMap) -> Self {
        Self { fabric, hosts, models: None, rows: Vec::new() }
    }

    /// The same, with these models for what has no row: inside a host, and between hosts. They keep
    /// four digits, those of their text.
    #[must_use]
    pub fn with_models(self, near: &CostModel, far: &CostModel) -> Self {
        Self { models: Some((text::as_written(near), text::as_written(far))), ..self }
    }

    /// Adds a row behind the others.
    ///
    /// # Errors
    ///
    /// It cannot be carried out in this world.
    pub fn push(&mut self, row: Row) -> Result<(), SelectError> {
        select_way(&row.way, row.collective, row.from_bytes, &self.platform())?;
        self.rows.push(Row { collective: any_root(row.collective), ..row });
        Ok(())
    }

    /// Over which fabric.
    #[must_use]
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// Which rank is on which host.
    #[must_use]
    pub fn hosts(&self) -> &HostMap {
        &self.hosts
    }

    /// All rows.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The models for what has no row: inside a host, and between hosts.
    #[must_use]
    pub fn models(&self) -> Option<&(CostModel, CostModel)> {
        self.models.as_ref()
    }

    /// The world, with the models of this table where it has some.
    #[must_use]
    pub fn platform(&self) -> Platform {
        let platform = Platform::over(self.fabric, self.hosts.clone());
        match self.models {
            Some((near, far)) => Platform { near, far, ..platform },
            None => platform,
        }
    }

    /// The way for `bytes` bytes of the whole ([`whole_bytes`]), if there is a row.
    #[must_use]
    pub fn way(&self, collective: Collective, bytes: u64) -> Option<&Way> {
        let collective = any_root(collective);
        let rows = self.rows.iter().rev().filter(|row| row.collective == collective);
        rows.clone().find(|row| row.from_bytes <= bytes).map(|row| &row.way)
    }
}

/// The tables of a file: at most one for a world.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choices {
    tables: Vec<Table>,
}

impl Choices {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// See [`ChoicesError`]; it names the line.
    pub fn read(path: &Path) -> Result<Self, ChoicesError> {
        let failed =
            |source: io::Error| ChoicesError::Read { path: path.to_owned(), source: Arc::new(source) };
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(ChoicesError::TooLong { path: path.to_owned(), bytes, most: FILE_BYTES_MAX });
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        text.parse().map_err(|misplaced| ChoicesError::Line { path: path.to_owned(), misplaced })
    }

    /// Takes a table in, in the place of the one for the same world.
    pub fn insert(&mut self, table: Table) {
        let same = |other: &&mut Table| other.fabric == table.fabric && other.hosts == table.hosts;
        match self.tables.iter_mut().find(same) {
            Some(other) => *other = table,
            None => self.tables.push(table),
        }
    }

    /// The table for a world.
    #[must_use]
    pub fn table(&self, fabric: Fabric, hosts: &HostMap) -> Option<&Table> {
        self.tables.iter().find(|table| table.fabric == fabric && table.hosts == *hosts)
    }

    /// All tables.
    #[must_use]
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// What ranks compare: equal for equal tables, whatever was noted beside them.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let text = text::without_notes(self);
        // FNV-1a: ranks are compared to find mistakes, not to keep anybody out.
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
            (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }
}

/// Where a group takes its choices from; the same on all ranks, who compare digests when they meet.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Pinned {
    /// The cost model chooses.
    #[default]
    Nothing,
    /// From a file. Where it has no table for the group's world the cost model chooses, and rank 0
    /// warns.
    File(PathBuf),
    /// From these, in the same way.
    These(Arc<Choices>),
}

impl Pinned {
    /// The file that `PLEACH_CHOICES` names.
    #[must_use]
    pub fn from_env() -> Self {
        match std::env::var_os(CHOICES_VARIABLE).filter(|value| !value.is_empty()) {
            Some(path) => Self::File(path.into()),
            None => Self::Nothing,
        }
    }

    /// The same, read.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or holds no choices.
    pub fn read(&self) -> Result<Self, ChoicesError> {
        match self {
            Self::File(path) => Ok(Self::These(Arc::new(Choices::read(path)?))),
            other => Ok(other.clone()),
        }
    }

    /// The table of a world.
    #[must_use]
    pub fn table(&self, fabric: Fabric, hosts: &HostMap) -> Option<Arc<Table>> {
        match self {
            Self::These(choices) => choices.table(fabric, hosts).cloned().map(Arc::new),
            _ => None,
        }
    }

    /// What ranks compare when they meet.
    #[must_use]
    pub fn knob(&self) -> String {
        match self {
            Self::These(choices) => format!("{:016x}", choices.digest()),
            _ => "none".to_owned(),
        }
    }

    /// Warns where choices say nothing of this world, so that the cost model chooses; of one rank
    /// there is nothing to say. `named`: the same before they were read.
    pub fn warn_without_table(&self, named: &Self, fabric: Fabric, hosts: &HostMap) {
        let Self::These(choices) = self else { return };
        if hosts.ranks() == 1 || choices.table(fabric, hosts).is_some() {
            return;
        }
        let known: Vec<_> =
            choices.tables.iter().map(|table| format!("{} {}", table.fabric, table.hosts)).collect();
        let known = if known.is_empty() { "nothing".to_owned() } else { known.join(", ") };
        let file = match named {
            Self::File(path) => path.display().to_string(),
            _ => "the choices given".to_owned(),
        };
        tracing::warn!(
            "no choices for {fabric} {hosts} (hosts x ranks): {file} has {known}; the built-in choices are used, \
             'pleach tune' measures better ones"
        );
    }
}

/// How many bytes `part_bytes` of each part are together, as tables and `pleach bench` count: of
/// all-to-all the blocks of one rank, of other collectives those that one rank has at the end or
/// had at the beginning.
#[must_use]
pub fn whole_bytes(collective: Collective, part_bytes: u64, ranks: u32) -> u64 {
    let parts = if collective == Collective::AllToAll { ranks } else { collective.parts(ranks) };
    part_bytes.saturating_mul(parts.into())
}

/// The same collective with the roots that tables have.
fn any_root(collective: Collective) -> Collective {
    Collective::from_name(collective.name()).unwrap_or(collective)
}

#[cfg(test)]
mod tests {
    use crate::generate::{Access, Algorithm};

    use super::*;

    fn row(collective: Collective, from_bytes: u64, algorithm: Algorithm, access: Access) -> Row {
        let way = Way { access: Some(access), ..algorithm.into() };
        Row { collective, from_bytes, way, note: None }
    }

    #[test]
    fn the_row_of_a_size_is_the_last_that_begins_below_it_whatever_the_root() {
        let mut table = Table::new(Fabric::Shm, HostMap::one(4));
        table.push(row(Collective::Reduce { root: 3 }, 0, Algorithm::Chain, Access::Put)).expect("it fits");
        table.push(row(Collective::AllReduce, 0, Algorithm::Exchange, Access::Put)).expect("it fits");
        table.push(row(Collective::AllReduce, 4096, Algorithm::Direct, Access::Mapped)).expect("it fits");
        let name = |collective, bytes| table.way(collective, bytes).map(|way| way.algorithm.to_string());
        assert_eq!(name(Collective::AllReduce, 0).as_deref(), Some("exchange"));
        assert_eq!(name(Collective::AllReduce, 4095).as_deref(), Some("exchange"));
        assert_eq!(name(Collective::AllReduce, 4096).as_deref(), Some("direct"));
        assert_eq!(name(Collective::Reduce { root: 1 }, 1 << 40).as_deref(), Some("chain"));
        assert_eq!(name(Collective::AllGather, 8), None);
    }

    #[test]
    fn without_models_of_its_own_a_table_has_those_of_its_fabric() {
        let far = |fabric| Table::new(fabric, HostMap::one(2)).platform().far;
        assert_eq!(far(Fabric::Verbs), CostModel::VERBS);
        assert_eq!(far(Fabric::Tcp), CostModel::TCP);
    }

    #[test]
    fn what_cannot_be_carried_out_in_the_world_is_no_row() {
        let mut tcp = Table::new(Fabric::Tcp, HostMap::one(4));
        let mapped = tcp.push(row(Collective::AllReduce, 0, Algorithm::Direct, Access::Mapped));
        assert!(matches!(mapped, Err(SelectError::NotMapped { .. })), "{mapped:?}");
        let grid = tcp.push(row(Collective::AllReduce, 0, Algorithm::Grid(vec![3, 2]), Access::Put));
        assert!(matches!(grid, Err(SelectError::Generate(_))), "{grid:?}");
        let chain = tcp.push(row(Collective::AllReduce, 0, Algorithm::Chain, Access::Put));
        assert!(matches!(chain, Err(SelectError::Generate(_))), "{chain:?}");
        for window in [0, 1 << 20] {
            let way = Way { window: Some(window), ..Algorithm::Ring.into() };
            let wide = tcp.push(Row { way, ..row(Collective::AllReduce, 0, Algorithm::Ring, Access::Put) });
            assert!(matches!(wide, Err(SelectError::Window { .. })), "{wide:?}");
        }
        assert!(tcp.rows().is_empty());
    }

    #[test]
    fn digests_differ_with_what_is_chosen_and_not_with_what_was_noted() {
        let choices = |algorithm: Algorithm, from_bytes, note| {
            let mut table = Table::new(Fabric::Tcp, HostMap::one(4));
            table
                .push(Row { note, ..row(Collective::AllReduce, from_bytes, algorithm, Access::Put) })
                .expect("it fits");
            let mut choices = Choices::default();
            choices.insert(table);
            choices
        };
        let note = Note { bytes: 8, seconds: 1e-6, next: None };
        let one = choices(Algorithm::Ring, 0, None).digest();
        assert_eq!(one, choices(Algorithm::Ring, 0, Some(note)).digest());
        assert_ne!(one, choices(Algorithm::Direct, 0, None).digest());
        assert_ne!(one, choices(Algorithm::Ring, 8, None).digest());
        assert_ne!(one, Choices::default().digest());
    }

    #[test]
    fn a_table_takes_the_place_of_that_of_the_same_world() {
        let mut choices = Choices::default();
        let worlds = [(Fabric::Shm, 2), (Fabric::Shm, 4), (Fabric::Tcp, 4)];
        for (fabric, ranks) in worlds {
            choices.insert(Table::new(fabric, HostMap::one(ranks)));
        }
        let mut table = Table::new(Fabric::Shm, HostMap::one(4));
        table.push(row(Collective::Barrier, 0, Algorithm::RecursiveDoubling, Access::Put)).expect("it fits");
        choices.insert(table.clone());
        assert_eq!(choices.tables().len(), worlds.len());
        assert_eq!(choices.table(Fabric::Shm, &HostMap::one(4)), Some(&table));
        assert_eq!(choices.table(Fabric::Tcp, &HostMap::one(4)).map(|table| table.rows().len()), Some(0));
        assert_eq!(choices.table(Fabric::Shm, &HostMap::one(3)), None);
    }
}
