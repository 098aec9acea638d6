//! Which thread block and channel carries out which step.
//!
//! A connection (two GPUs, one direction, one channel) is used by one thread block at each
//! end. A step that receives and sends on ties the two transfers to one channel, so steps come
//! in *strands*; each strand takes the lowest channel on which the ends that it needs are free
//! or belong to thread blocks with the same peers. If sharing lets thread blocks wait for each
//! other in a circle, every block of the data gets channels of its own.

use std::collections::{BTreeMap, BTreeSet};

use pleach_vocabulary::Rank;

use super::error::ExportError;
use super::export::{Draft, Memory, Places};
use super::order::Order;
use super::{
    Algorithm, Buffer, Gpu, Instruction, Kind, MAX_CHANNEL_PEERS, MAX_CHANNELS, MAX_STEPS, MAX_THREAD_BLOCKS,
    ThreadBlock,
};

/// Which strands may share the ends of connections.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// All that fit.
    All,
    /// Those of one block of the data.
    OfBlock,
    /// None.
    Nothing,
}

/// The GPUs with their thread blocks, and how many channels these use.
pub(super) fn thread_blocks(
    ranks: u32,
    drafts: &[Draft],
    places: &Places,
) -> Result<(Vec<Gpu>, u32), ExportError> {
    for sharing in [Sharing::All, Sharing::OfBlock] {
        let (gpus, channels, is_in_order) = assigned(ranks, drafts, places, sharing)?;
        if is_in_order && !is_circular(&gpus) {
            return Ok((gpus, channels));
        }
    }
    let (gpus, channels, _) = assigned(ranks, drafts, places, Sharing::Nothing)?;
    Ok((gpus, channels))
}

fn is_circular(gpus: &[Gpu]) -> bool {
    let algorithm = Algorithm {
        name: String::new(),
        collective: String::new(),
        root: None,
        channels: 0,
        chunks: 0,
        in_place: true,
        out_of_place: true,
        gpus: gpus.to_vec(),
    };
    Order::of(&algorithm).is_err()
}

/// Says also whether what is sent on each connection is received in that order.
fn assigned(
    ranks: u32,
    drafts: &[Draft],
    places: &Places,
    sharing: Sharing,
) -> Result<(Vec<Gpu>, u32, bool), ExportError> {
    let mut ends = Ends::default();
    let of_draft = ends.channels(drafts, sharing)?;
    let mut gpus = Vec::with_capacity(ranks as usize);
    let mut drafts_of: Vec<Vec<usize>> = vec![Vec::new(); ranks as usize];
    (0..drafts.len()).for_each(|draft| drafts_of[drafts[draft].rank as usize].push(draft));
    // By connection: what is sent, and what is received.
    let mut order: BTreeMap<(u32, Rank, Rank), [Vec<usize>; 2]> = BTreeMap::new();
    for (rank, mut own) in drafts_of.into_iter().enumerate() {
        own.sort_by_key(|&draft| (drafts[draft].level, drafts[draft].block, draft));
        let rank = rank as Rank;
        let blocks = ends.blocks.remove(&rank).unwrap_or_default();
        for &draft in &own {
            let Draft { send, receive, .. } = &drafts[draft];
            let Some(channel) = of_draft[draft].map(|block| blocks[block].channel) else { continue };
            if let Some((transfer, peer)) = *send {
                order.entry((channel, rank, peer)).or_default()[0].push(transfer);
            }
            if let Some((transfer, peer)) = *receive {
                order.entry((channel, peer, rank)).or_default()[1].push(transfer);
            }
        }
        gpus.push(Layout { drafts, places, of_draft: &of_draft }.gpu(blocks, &own));
    }
    let channels = gpus.iter().flat_map(|gpu| &gpu.blocks).map(|block| block.channel + 1).max().unwrap_or(1);
    check(&gpus)?;
    Ok((gpus, channels, order.values().all(|[sent, received]| sent == received)))
}

fn check(gpus: &[Gpu]) -> Result<(), ExportError> {
    let at_most = |what, needed: usize, most: u32| {
        let (needed, most) = (needed as u64, u64::from(most));
        if needed > most { Err(ExportError::TooMany { what, needed, most }) } else { Ok(()) }
    };
    for gpu in gpus {
        at_most("thread blocks of a GPU", gpu.blocks.len(), MAX_THREAD_BLOCKS)?;
        let mut peers: BTreeMap<u32, [usize; 2]> = BTreeMap::new();
        for block in &gpu.blocks {
            at_most("steps of a thread block", block.steps.len(), MAX_STEPS)?;
            let of_channel = peers.entry(block.channel).or_default();
            of_channel[0] += usize::from(block.send.is_some());
            of_channel[1] += usize::from(block.receive.is_some());
            at_most("peers on a channel", of_channel[0].max(of_channel[1]), MAX_CHANNEL_PEERS)?;
        }
    }
    Ok(())
}

/// Whose thread block has which end of a connection.
#[derive(Default)]
struct Ends {
    blocks: BTreeMap<Rank, Vec<ThreadBlock>>,
    /// The first strand of a channel, by the block of the data that it is for.
    owners: BTreeMap<u32, u32>,
}

impl Ends {
    /// The thread block of every draft that sends or receives.
    fn channels(&mut self, drafts: &[Draft], sharing: Sharing) -> Result<Vec<Option<usize>>, ExportError> {
        let mut of_draft = vec![None; drafts.len()];
        for strand in strands(drafts) {
            let block = drafts[strand[0]].block;
            let is_free = |channel: &u32| match (self.owners.get(channel), sharing) {
                (None, _) | (_, Sharing::All) => true,
                (Some(&owner), Sharing::OfBlock) => owner == block,
                (Some(_), Sharing::Nothing) => false,
            };
            let fitting = (0..MAX_CHANNELS)
                .filter(is_free)
                .find_map(|channel| Some((channel, self.placed(drafts, &strand, channel)?)));
            let Some((channel, placed)) = fitting else {
                let (needed, most) = (u64::from(MAX_CHANNELS) + 1, u64::from(MAX_CHANNELS));
                return Err(ExportError::TooMany { what: "or more channels", needed, most });
            };
            self.owners.insert(channel, block);
            for (rank, blocks) in placed.blocks {
                self.blocks.insert(rank, blocks);
            }
            for (draft, block) in placed.of_draft {
                of_draft[draft] = Some(block);
            }
        }
        Ok(of_draft)
    }

    /// The thread blocks with a strand on this channel; none where an end is taken.
    fn placed(&self, drafts: &[Draft], strand: &[usize], channel: u32) -> Option<Placed> {
        let mut placed = Placed { blocks: BTreeMap::new(), of_draft: Vec::with_capacity(strand.len()) };
        for &index in strand {
            let Draft { rank, send, receive, .. } = &drafts[index];
            let (send, receive) = (send.map(|(_, peer)| peer), receive.map(|(_, peer)| peer));
            let known = || self.blocks.get(rank).cloned().unwrap_or_default();
            let blocks = placed.blocks.entry(*rank).or_insert_with(known);
            let on_channel = |block: &&mut ThreadBlock| block.channel == channel;
            let mut holders: Vec<usize> = Vec::new();
            for (number, block) in blocks.iter_mut().enumerate().filter(|(_, block)| on_channel(block)) {
                let holds_send = send.is_some() && block.send == send;
                let holds_receive = receive.is_some() && block.receive == receive;
                if holds_send || holds_receive {
                    holders.push(number);
                }
            }
            let number = match holders.as_slice() {
                [] => {
                    blocks.push(ThreadBlock { send, receive, channel, line: 0, steps: Vec::new() });
                    blocks.len() - 1
                }
                [only] => {
                    let block = &mut blocks[*only];
                    for (end, wanted) in [(&mut block.send, send), (&mut block.receive, receive)] {
                        match (*end, wanted) {
                            (Some(peer), Some(wanted)) if peer != wanted => return None,
                            (None, Some(_)) => *end = wanted,
                            _ => {}
                        }
                    }
                    *only
                }
                _ => return None,
            };
            placed.of_draft.push((index, number));
        }
        Some(placed)
    }
}

struct Placed {
    blocks: BTreeMap<Rank, Vec<ThreadBlock>>,
    of_draft: Vec<(usize, usize)>,
}

/// Drafts that must be on one channel, those that are needed first at the front.
fn strands(drafts: &[Draft]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..drafts.len())
        .filter(|&draft| drafts[draft].send.is_some() || drafts[draft].receive.is_some())
        .collect();
    order.sort_by_key(|&draft| (drafts[draft].block, drafts[draft].level, draft));
    let transfers = order
        .iter()
        .filter_map(|&draft| drafts[draft].send.map(|(transfer, _)| transfer + 1))
        .max()
        .unwrap_or(0);
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); transfers];
    for &draft in &order {
        for &(transfer, _) in drafts[draft].send.iter().chain(&drafts[draft].receive) {
            users[transfer].push(draft);
        }
    }
    let mut is_taken = vec![false; drafts.len()];
    let mut strands = Vec::new();
    for &start in &order {
        if is_taken[start] {
            continue;
        }
        is_taken[start] = true;
        let (mut strand, mut left) = (Vec::new(), vec![start]);
        while let Some(draft) = left.pop() {
            strand.push(draft);
            for (transfer, _) in drafts[draft].send.iter().chain(&drafts[draft].receive) {
                for &user in &users[*transfer] {
                    if !std::mem::replace(&mut is_taken[user], true) {
                        left.push(user);
                    }
                }
            }
        }
        strands.push(strand);
    }
    strands
}

/// The steps of a GPU in its thread blocks.
struct Layout<'a> {
    drafts: &'a [Draft],
    places: &'a Places,
    of_draft: &'a [Option<usize>],
}

/// A memory of a GPU for a block of the data; input and output may be one.
type Location = (u32, Memory);

/// Who has touched it.
#[derive(Default)]
struct Touched {
    write: Option<usize>,
    reads: Vec<usize>,
}

impl Layout<'_> {
    fn gpu(&self, mut blocks: Vec<ThreadBlock>, own: &[usize]) -> Gpu {
        let mut gpu = self.places.gpu();
        let mut scratch: BTreeMap<Location, u32> = BTreeMap::new();
        let mut touched: BTreeMap<Location, Touched> = BTreeMap::new();
        let mut block_of: BTreeMap<usize, usize> = BTreeMap::new();
        let mut local = None;
        // By thread block: its drafts, each with the drafts of other blocks that it comes after.
        let mut lists: Vec<Vec<(usize, Vec<usize>)>> = vec![Vec::new(); blocks.len()];
        for &draft in own {
            let earlier = self.conflicts(draft, &mut touched);
            let block =
                self.of_draft[draft].or_else(|| earlier.iter().next_back().map(|earlier| block_of[earlier]));
            let block = block.unwrap_or_else(|| {
                *local.get_or_insert_with(|| {
                    blocks.push(ThreadBlock {
                        send: None,
                        receive: None,
                        channel: 0,
                        line: 0,
                        steps: Vec::new(),
                    });
                    lists.push(Vec::new());
                    blocks.len() - 1
                })
            });
            block_of.insert(draft, block);
            let elsewhere = earlier.into_iter().filter(|earlier| block_of[earlier] != block).collect();
            lists[block].push((draft, elsewhere));
        }
        let position: BTreeMap<usize, (usize, usize)> = lists
            .iter()
            .enumerate()
            .flat_map(|(block, list)| {
                list.iter().enumerate().map(move |(index, &(draft, _))| (draft, (block, index)))
            })
            .collect();
        let (needed, numbers) = numbered(&lists, &position);
        let is_waited_for: BTreeSet<usize> = needed.iter().flatten().flatten().copied().collect();
        for (block, list) in lists.iter().enumerate() {
            for (index, &(draft, _)) in list.iter().enumerate() {
                let after = |earlier: &usize| {
                    let (other, index) = position[earlier];
                    (other as u32, numbers[other][index])
                };
                let mut waits: Vec<(u32, u32)> = needed[block][index].iter().map(after).collect();
                let last = waits.pop();
                blocks[block].steps.extend(waits.into_iter().map(nothing));
                let mut step = self.instruction(draft, &mut scratch, &mut gpu.scratch_chunks);
                step.after = last;
                step.is_waited_for = is_waited_for.contains(&draft);
                blocks[block].steps.push(step);
            }
        }
        gpu.blocks = blocks;
        gpu
    }

    /// The earlier drafts of this GPU that must be over before one begins.
    fn conflicts(&self, draft: usize, touched: &mut BTreeMap<Location, Touched>) -> BTreeSet<usize> {
        let Draft { block, kind, source, target, .. } = self.drafts[draft];
        let at = |memory| (block, if memory == Memory::Input { Memory::Output } else { memory });
        let mut earlier = BTreeSet::new();
        let reads = [kind.reads_source().then_some(source), (kind == Kind::Reduce).then_some(target)];
        for place in reads.into_iter().flatten() {
            let touched = touched.entry(at(place)).or_default();
            earlier.extend(touched.write);
            touched.reads.push(draft);
        }
        if kind.writes_target() {
            let touched = touched.entry(at(target)).or_default();
            earlier.extend(touched.write.replace(draft));
            earlier.extend(touched.reads.drain(..));
        }
        earlier.remove(&draft);
        earlier
    }

    fn instruction(
        &self,
        draft: usize,
        scratch: &mut BTreeMap<Location, u32>,
        chunks: &mut u32,
    ) -> Instruction {
        let Draft { block, kind, source, target, .. } = self.drafts[draft];
        let count = self.places.count(block);
        let mut place = |memory, is_used: bool| match memory {
            Memory::Scratch(_) if is_used => {
                let first = *scratch.entry((block, memory)).or_insert_with(|| {
                    *chunks += count;
                    *chunks - count
                });
                (Buffer::Scratch, first)
            }
            Memory::Scratch(_) => (Buffer::Scratch, 0),
            data => self.places.of_data(data, block),
        };
        let mut source_at = place(source, kind.reads_source());
        let mut target_at = place(target, kind.writes_target());
        // What is not used repeats what is, as in the runtimes' own files.
        if !kind.reads_source() {
            source_at = target_at;
        }
        if !kind.writes_target() {
            target_at = source_at;
        }
        Instruction {
            kind,
            source: source_at,
            target: target_at,
            count,
            after: None,
            is_waited_for: false,
            line: 0,
        }
    }
}

/// Of every draft those it has to wait for explicitly, at most one of each thread block; and every
/// draft's step number.
fn numbered(
    lists: &[Vec<(usize, Vec<usize>)>],
    position: &BTreeMap<usize, (usize, usize)>,
) -> (Vec<Vec<Vec<usize>>>, Vec<Vec<u32>>) {
    let mut needed = Vec::with_capacity(lists.len());
    let mut numbers = Vec::with_capacity(lists.len());
    for list in lists {
        let mut known: BTreeMap<usize, usize> = BTreeMap::new();
        let (mut of_list, mut next, mut of_drafts) = (Vec::new(), 0, Vec::new());
        for (_, earlier) in list {
            let mut latest: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
            for &draft in earlier {
                let (block, index) = position[&draft];
                if known.get(&block).is_none_or(|&known| known < index) {
                    known.insert(block, index);
                    latest.insert(block, (index, draft));
                }
            }
            let waits: Vec<usize> = latest.values().map(|&(_, draft)| draft).collect();
            next += waits.len().saturating_sub(1) as u32;
            of_drafts.push(next);
            next += 1;
            of_list.push(waits);
        }
        needed.push(of_list);
        numbers.push(of_drafts);
    }
    (needed, numbers)
}

/// Carries one more dependency of the step after it.
fn nothing(after: (u32, u32)) -> Instruction {
    Instruction {
        kind: Kind::Nothing,
        source: (Buffer::Input, 0),
        target: (Buffer::Output, 0),
        count: 0,
        after: Some(after),
        is_waited_for: false,
        line: 0,
    }
}
