/*
 * Publish, find, go on behind, withdraw: public prefixes and their hollow namesakes.
 *
 * The smallest house in which they meet: two slots of the host tier, and three blocks. SHARED_COPY
 * is the published copy of a prefix, in a slot that only its publication gave it. NAMESAKE is the
 * same prefix in the chain of the tenant that finds it: known by its tokens alone (KNOW), or whole
 * once that tenant has computed the prefix itself (FILL, or a first seal). TAIL hangs below
 * NAMESAKE, sealed by a sequence that went on behind the prefix. A publisher, readers, a sequence
 * that computes the prefix without looking for public ones, and an evictor. What is atomic here is
 * what is done under the engine's lock; bytes move in steps of their own.
 *
 * Laws, as assertions: a hit has bytes, and whole ones, until its reader lets go; nothing is found
 * after its withdrawal was answered; what is indexed has its parent indexed; a namesake that nothing
 * needs is gone; a slot has one owner; no reference is lost.
 *
 * -DBUG=1 to 7 plants one breach each, and the model must find it: see run.sh.
 */
#ifndef BUG
#define BUG 0
#endif
#ifndef READERS
#define READERS 2
#endif

#define SHARED_COPY 0
#define NAMESAKE 1
#define TAIL 2

/* Of kvk_block_state, those that matter here: WHOLE is SEALED, SHARED and EVICTABLE in one. */
#define FREE 0
#define HOLLOW 1
#define WHOLE 2

#define NOTHING 0
#define TORN 1
#define PREFIX 2
#define REST 3

#define SLOTS 2
#define NO_SLOT SLOTS

byte state[3];
byte slot[3] = NO_SLOT;
byte holds[3];
byte anchors; /* open sequences whose chain goes on from NAMESAKE */
bool listed;  /* look-ups see the publication */
bool answered; /* the withdrawal of the last publication was answered */
byte claims[SLOTS];
byte bytes[SLOTS];

bool quit;
byte home;
#define WORKERS (READERS + 3)

inline take(s)
{
    if
    :: claims[0] == 0 -> s = 0
    :: claims[1] == 0 -> s = 1
    fi;
    claims[s]++
}

inline give(s)
{
    assert(claims[s] == 1);
    claims[s]--;
    bytes[s] = NOTHING
}

#define has_room (claims[0] == 0 || claims[1] == 0)

/* The block has these bytes from now on, alone. */
inline become_whole(b, s)
{
    assert(state[b] != WHOLE && slot[b] == NO_SLOT);
    state[b] = WHOLE;
    slot[b] = s
}

/* The last copy goes: HOLLOW where its place is needed, else FREE. */
inline evict(b)
{
    assert(state[b] == WHOLE && holds[b] == 0);
    give(slot[b]);
    slot[b] = NO_SLOT;
    if
    :: b == NAMESAKE && (state[TAIL] == WHOLE || anchors > 0) -> state[b] = HOLLOW
    :: else -> state[b] = FREE
    fi
}

/* PRUNE: a hollow namesake that nothing needs. */
inline prune()
{
    if
    :: state[NAMESAKE] == HOLLOW && (state[TAIL] == FREE || BUG == 4) && anchors == 0 ->
        state[NAMESAKE] = FREE
    :: else -> skip
    fi;
    assert(state[TAIL] == FREE || state[NAMESAKE] != FREE) /* an ancestor is indexed */
}

/* Nobody publishes it and nobody reads it: its slot comes back. */
inline settle_shared_copy()
{
    if
    :: holds[SHARED_COPY] == 0 && state[SHARED_COPY] == WHOLE -> evict(SHARED_COPY)
    :: else -> skip
    fi
}

/* Its source is held meanwhile, and is not in this house. */
proctype publisher()
{
    byte s;
    do
    :: atomic {
        !quit && !listed && state[SHARED_COPY] == FREE && has_room;
        take(s);
#if BUG == 1
        become_whole(SHARED_COPY, s);
        holds[SHARED_COPY]++;
        listed = true;
        answered = false
#endif
        }
        bytes[s] = TORN;
        bytes[s] = PREFIX;
        atomic {
#if BUG != 1
            become_whole(SHARED_COPY, s);
            holds[SHARED_COPY]++;
            listed = true;
            answered = false;
#endif
            s = 0
        }
#if BUG == 2
        answered = true;
#endif
        atomic {
            listed = false;
            holds[SHARED_COPY]--;
#if BUG == 3
            give(slot[SHARED_COPY]);
            slot[SHARED_COPY] = NO_SLOT;
            state[SHARED_COPY] = FREE;
#else
            settle_shared_copy();
#endif
            answered = true
        }
    :: atomic { quit -> break }
    od;
    home++
}

/* A sequence: it finds the prefix, its own first, and goes on behind it. */
proctype reader()
{
    byte b, s;
idle:
    do
    :: atomic {
        !quit && (state[NAMESAKE] == WHOLE || listed || (BUG == 6 && state[NAMESAKE] == HOLLOW));
        if
        :: state[NAMESAKE] == WHOLE || (BUG == 6 && state[NAMESAKE] == HOLLOW) -> b = NAMESAKE
        :: else -> b = SHARED_COPY;
            assert(!answered); /* withdrawn is withdrawn */
#if BUG != 5
            if
            :: state[NAMESAKE] == FREE -> state[NAMESAKE] = HOLLOW /* KNOW */
            :: else -> skip
            fi
#endif
        fi;
        assert(state[b] == WHOLE && slot[b] != NO_SLOT); /* a hit has bytes */
        holds[b]++;
        anchors++
        }
        assert(bytes[slot[b]] == PREFIX); /* and whole ones */
        if
        :: atomic { has_room -> take(s) }
            bytes[s] = TORN;
            bytes[s] = REST;
            atomic { /* seal: of two the first wins */
                if
                :: state[TAIL] == FREE ->
                    assert(state[NAMESAKE] != FREE); /* prefix-closed */
                    become_whole(TAIL, s)
                :: else -> give(s)
                fi;
                s = 0
            }
        :: skip
        fi;
        atomic {
            assert(slot[b] != NO_SLOT && bytes[slot[b]] == PREFIX); /* until it lets go */
            holds[b]--;
            anchors--;
            settle_shared_copy();
#if BUG != 7
            prune();
#endif
            b = 0
        }
    :: atomic { quit -> break }
    od;
    home++
}

/* A sequence of the same tenant that does not look for public prefixes, and computes this one. */
proctype computer()
{
    byte s;
    do
    :: atomic { !quit && state[NAMESAKE] != WHOLE && has_room; take(s) }
        bytes[s] = TORN;
        bytes[s] = PREFIX;
        atomic {
            if
            :: state[NAMESAKE] != WHOLE -> become_whole(NAMESAKE, s) /* FILL, or a first seal */
            :: else -> give(s)
            fi;
            s = 0
        }
    :: atomic { quit -> break }
    od;
    home++
}

/* Leaves first or not: a copy can also be lost to damage, and leaves HOLLOW then. */
proctype evictor()
{
    do
    :: atomic { !quit && state[TAIL] == WHOLE && holds[TAIL] == 0; evict(TAIL); prune() }
    :: atomic { !quit && state[NAMESAKE] == WHOLE && holds[NAMESAKE] == 0; evict(NAMESAKE) }
    :: atomic { quit -> break }
    od;
    home++
}

/* The day ends at any time. Then no reference is left, each slot is free or one copy's, and a
 * hollow namesake has somebody who needs it. */
proctype evening()
{
    quit = true;
    home == WORKERS;
    atomic {
        assert(!listed && state[SHARED_COPY] == FREE && anchors == 0);
        assert(holds[SHARED_COPY] == 0 && holds[NAMESAKE] == 0 && holds[TAIL] == 0);
        assert(state[NAMESAKE] != HOLLOW || state[TAIL] == WHOLE);
        assert(claims[0] + claims[1] == (state[NAMESAKE] == WHOLE) + (state[TAIL] == WHOLE));
        assert(state[NAMESAKE] != WHOLE || bytes[slot[NAMESAKE]] == PREFIX);
        assert(state[TAIL] != WHOLE || bytes[slot[TAIL]] == REST)
    }
}

init
{
    atomic {
        run publisher();
        run reader();
#if READERS > 1
        run reader();
#endif
        run computer();
        run evictor();
        run evening()
    }
}
