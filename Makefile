# gradq.  `make help` lists the targets.
#
# PREFIX= DESTDIR=   where `make install` puts things
# V=1                show the commands
# SANITIZE=address|thread   build into build/<name> with that sanitizer (make asan, make tsan use it)

PREFIX   ?= /usr/local
CC       := gcc
SANITIZE ?=
BUILD    := build$(if $(SANITIZE),/$(SANITIZE))
comma    := ,
Q        := $(if $(V),,@)

PACKAGES := libczmq libzmq jansson libisal inih libxxhash
# libczmq's .pc drags in every optional dependency of its own static build; name the two libraries.
CPPFLAGS += -Iinclude -Isrc -D_GNU_SOURCE $(shell pkg-config --cflags jansson 2>/dev/null)
# -ffp-contract=off: the same float32 bits on every CPU level.  No -ffast-math anywhere.
CFLAGS   ?= -O3 -g
CFLAGS   += -std=c11 -pthread -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math \
            -fvisibility=hidden \
            -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wconversion -Werror
LDLIBS   := -lczmq -lzmq -ljansson -lisal -linih -lxxhash -ldl -lm -pthread
LDFLAGS  += -rdynamic
ifneq ($(SANITIZE),)
CFLAGS   := $(filter-out -O3,$(CFLAGS)) -O1 -fsanitize=$(SANITIZE)$(if $(filter address,$(SANITIZE)),$(comma)undefined) -fno-omit-frame-pointer
LDFLAGS  += -fsanitize=$(SANITIZE)$(if $(filter address,$(SANITIZE)),$(comma)undefined)
endif

LIB_OBJ       := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard src/*.c))
BROKER_OBJ    := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard broker/*.c))
OPTIMIZER_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard optimizer/*.c))
ACTOR_OBJ     := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard actors/*.c))
TOOLS         := $(patsubst tools/%.c,$(BUILD)/%,$(wildcard tools/gradq-*.c))
PLUGINS       := $(patsubst optimizer/plugins/%.c,$(BUILD)/plugins/%.so,$(wildcard optimizer/plugins/*.c))
PARTS_OBJ     := $(filter-out %/main.o,$(BROKER_OBJ) $(OPTIMIZER_OBJ) $(ACTOR_OBJ))
TEST_OBJ      := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/test_*.c))
TEST_PROGRAMS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/main_*.c))
PROGRAMS      := $(if $(BROKER_OBJ),$(BUILD)/gradq-broker) $(if $(OPTIMIZER_OBJ),$(BUILD)/gradq-optimizer) \
                 $(if $(ACTOR_OBJ),$(BUILD)/gradq-actor) $(TOOLS)

.PHONY: all
all: $(PROGRAMS) $(PLUGINS) ## build every program and plug-in into build/

$(BUILD)/libgradq.a: $(LIB_OBJ)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/gradq-broker: $(BROKER_OBJ) $(BUILD)/libgradq.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/gradq-optimizer: $(OPTIMIZER_OBJ) $(BUILD)/libgradq.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/gradq-actor: $(ACTOR_OBJ) $(BUILD)/libgradq.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ -lopenblas $(LDLIBS)
$(BUILD)/gradq-%: $(BUILD)/obj/tools/gradq-%.o $(BUILD)/libgradq.a
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LDLIBS)
$(BUILD)/plugins/%.so: optimizer/plugins/%.c include/gradq/optimizer.h include/gradq/limits.h
	@mkdir -p $(@D)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -shared -o $@ $< -lm
$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -I. -MMD -MP -c -o $@ $<

$(BUILD)/tests/unit: $(TEST_OBJ) $(PARTS_OBJ) $(BUILD)/libgradq.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ -lcriterion -lopenblas $(LDLIBS)
$(BUILD)/tests/main_%: $(BUILD)/obj/tests/main_%.o $(PARTS_OBJ) $(BUILD)/libgradq.a
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ -lopenblas $(LDLIBS)

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
.SECONDARY:

.PHONY: help clean
help: ## list the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 12
clean: ## remove build/
	rm -rf build
